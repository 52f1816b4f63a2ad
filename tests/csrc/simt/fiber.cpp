#include "simt/fiber.h"

#include <cstdlib>

#include "simt/language.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define __sanitizer_start_switch_fiber(...)
#define __sanitizer_finish_switch_fiber(...)
#define __asan_unpoison_memory_region(...)
#endif

// Pushes what a call must preserve, changes stacks, and returns on the other one.
extern "C" void octavo_simt_switch(void** save, void* to);
asm(R"(
.text
.globl octavo_simt_switch
.hidden octavo_simt_switch
.type octavo_simt_switch, @function
octavo_simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size octavo_simt_switch, .-octavo_simt_switch
)");

namespace octavo::simt {
namespace {

constexpr std::size_t kStack = 128 * 1024;

void* scheduler_stack_pointer = nullptr;
[[maybe_unused]] const void* scheduler_bottom = nullptr;
[[maybe_unused]] std::size_t scheduler_size = 0;

std::vector<unsigned char*>& free_stacks() {
    static std::vector<unsigned char*> pool;
    return pool;
}

}  // namespace

void prepare(Fiber& fiber, void (*entry)()) {
    if (free_stacks().empty()) {
        free_stacks().push_back(static_cast<unsigned char*>(std::malloc(kStack)));
    }
    fiber.stack = free_stacks().back();
    free_stacks().pop_back();
    __asan_unpoison_memory_region(fiber.stack, kStack);
    auto* top = reinterpret_cast<void**>(fiber.stack + kStack - 64);  // entry finds an unaligned call frame
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) {
        *--top = nullptr;
    }
    fiber.stack_pointer = top;
}

void give_back_stack(Fiber& fiber) { free_stacks().push_back(fiber.stack); }

void to_fiber(Fiber& fiber) {
    self = &fiber;
    threadIdx = fiber.thread;
    blockIdx = fiber.block->index;
    blockDim = fiber.block->size;
    gridDim = fiber.block->grid;
    [[maybe_unused]] void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack, kStack);
    octavo_simt_switch(&scheduler_stack_pointer, fiber.stack_pointer);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
    self = nullptr;
}

void to_scheduler([[maybe_unused]] bool last) {
    Fiber* me = self;
    [[maybe_unused]] void* fake = nullptr;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake, scheduler_bottom, scheduler_size);
    octavo_simt_switch(&me->stack_pointer, scheduler_stack_pointer);
    __sanitizer_finish_switch_fiber(fake, &scheduler_bottom, &scheduler_size);
}

void arrived_in_fiber() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size); }

}  // namespace octavo::simt
