// What is done to numbers between two products.
#pragma once

namespace octavo {

enum class Activation { kRelu, kGelu, kGeluTanh, kSilu };

}  // namespace octavo
