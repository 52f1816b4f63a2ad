#include "octavo/team_order.h"

#include <cstring>
#include <utility>

#include "lines.h"

namespace octavo {
namespace {

// An array of the plan, and where the next one begins.
TensorRef array_at(char*& place, DType dtype, std::int64_t rows, std::int64_t columns = -1) {
    TensorRef array;
    array.data = place;
    array.dtype = dtype;
    array.ndim = columns < 0 ? 1 : 2;
    array.shape[0] = rows;
    array.stride[0] = columns < 0 ? 1 : columns;
    array.shape[1] = columns < 0 ? 0 : columns;
    array.stride[1] = columns < 0 ? 0 : 1;
    place += lines(rows * (columns < 0 ? 1 : columns) * size_of(dtype));
    return array;
}

void copy(const TensorRef& to, const TensorRef& from) {
    const std::int64_t size = size_of(to.dtype), rows = to.ndim == 1 ? 1 : to.shape[0];
    const std::int64_t row = (to.ndim == 1 ? to.shape[0] : to.shape[1]) * size;
    for (std::int64_t i = 0; i < rows && row > 0; ++i) {
        std::memcpy(to.as<char>() + i * row, from.as<char>() + i * from.stride[0] * size,
                    static_cast<std::size_t>(row));
    }
}

}  // namespace

struct TeamOrder::Header {
    Order order;
    std::int64_t tokens, sequences, table_width, rows, lora_rows, lora_groups;
};

TeamOrder::TeamOrder(const Team& team, std::int64_t tokens, std::int64_t plan_bytes)
    : header_(reinterpret_cast<Header*>(team.room())),
      plan_(team.room() + lines(sizeof(Header))),
      tokens_(tokens),
      plan_bytes_(plan_bytes) {
    require(tokens > 0 && plan_bytes > 0 && plan_bytes < kMostElements, "tokens", "leave no room for a step");
    require(team.room_bytes() >= room_bytes(plan_bytes), "memory", "has too little room for the orders of a group");
}

std::int64_t TeamOrder::room_bytes(std::int64_t plan_bytes) { return lines(sizeof(Header)) + lines(plan_bytes); }

void TeamOrder::order_forward(const TeamStep& step) {
    const BatchRef& batch = step.batch;
    for (const auto& [ids, name] : {std::pair{&step.token_ids, "token_ids"}, std::pair{&step.positions, "positions"},
                                    std::pair{&step.slots, "slots"}}) {
        expect(*ids, name, {step.token_ids.shape[0]}, DType::kI64);
    }
    expect(step.rows, "rows", {kAny}, DType::kI64);
    expect(batch.seq_lens, "seq_lens", {kAny}, DType::kI32);
    expect(batch.cu_q, "cu_q", {batch.seq_lens.shape[0] + 1}, DType::kI32);
    expect(batch.tables, "block_tables", {batch.seq_lens.shape[0], kAny}, DType::kI32);
    const auto count = [](const TensorRef& array) { return array.given() ? array.shape[0] : 0; };
    const Header header{Order::kForward,    step.token_ids.shape[0], batch.seq_lens.shape[0], batch.tables.shape[1],
                        step.rows.shape[0], count(step.lora_rows),   count(step.lora_groups)};
    require(header.tokens <= tokens_, "token_ids", "are more than a step of this group may have");
    require(plan_bytes_of(header) <= plan_bytes_, "block_tables", "are more than a step of this group may have");
    *header_ = header;
    const TeamStep to = this->step();
    copy(to.token_ids, step.token_ids);
    copy(to.positions, step.positions);
    copy(to.slots, step.slots);
    copy(to.rows, step.rows);
    copy(to.batch.cu_q, batch.cu_q);
    copy(to.batch.seq_lens, batch.seq_lens);
    copy(to.batch.tables, batch.tables);
    copy(to.lora_rows, step.lora_rows);
    copy(to.lora_groups, step.lora_groups);
}

std::int64_t TeamOrder::plan_bytes_of(const Header& header) {
    const std::int64_t sequences = header.sequences;
    return 3 * lines(header.tokens * 8) + lines(header.rows * 8) + lines((sequences + 1) * 4) + lines(sequences * 4) +
           lines(sequences * header.table_width * 4) + lines(header.lora_rows * 8) + lines(header.lora_groups * 3 * 8);
}

char* TeamOrder::order_data() const { return reinterpret_cast<char*>(header_); }
std::int64_t TeamOrder::most_order_bytes() const { return lines(sizeof(Header)) + plan_bytes_; }

std::int64_t TeamOrder::order_bytes() const {
    return lines(sizeof(Header)) + (header_->order == Order::kForward ? plan_bytes_of(*header_) : 0);
}

bool TeamOrder::order_has_room() const {
    const Header& header = *header_;
    if (header.order == Order::kLogits) {
        return header.rows > 0 && header.rows <= kRows;
    }
    const auto fits = [](std::int64_t size, std::int64_t most) { return size >= 0 && size <= most; };
    const std::int64_t most_ids = plan_bytes_ / 4;
    return header.order == Order::kForward && fits(header.tokens, tokens_) && fits(header.sequences, most_ids) &&
           fits(header.rows, most_ids) && fits(header.lora_rows, most_ids) && fits(header.lora_groups, most_ids) &&
           fits(header.table_width, header.sequences > 0 ? most_ids / header.sequences : 0) &&
           plan_bytes_of(header) <= plan_bytes_;
}

void TeamOrder::order_logits(std::int64_t rows) {
    header_->order = Order::kLogits;
    header_->rows = rows;
}

Order TeamOrder::order() const { return header_->order; }
std::int64_t TeamOrder::rows() const { return header_->rows; }

TeamStep TeamOrder::step() const {
    char* place = plan_;
    const Header& header = *header_;
    TeamStep step;
    step.token_ids = array_at(place, DType::kI64, header.tokens);
    step.positions = array_at(place, DType::kI64, header.tokens);
    step.slots = array_at(place, DType::kI64, header.tokens);
    step.rows = array_at(place, DType::kI64, header.rows);
    step.batch.cu_q = array_at(place, DType::kI32, header.sequences + 1);
    step.batch.seq_lens = array_at(place, DType::kI32, header.sequences);
    step.batch.tables = array_at(place, DType::kI32, header.sequences, header.table_width);
    step.lora_rows = array_at(place, DType::kI64, header.lora_rows);
    step.lora_groups = array_at(place, DType::kI64, header.lora_groups, 3);
    return step;
}

}  // namespace octavo
