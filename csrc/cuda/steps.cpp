#include "steps.h"

#include <algorithm>
#include <utility>

namespace streamoverlap::cuda {
namespace {

using plan::FlagKind;
using plan::Kind;
using plan::Op;

class Compiler {
 public:
  Compiler(const Call& call, const Layout& layout, const RegisteredControls& controls)
      : call_(call), layout_(layout), controls_(controls) {
    steps_.events = call.plan->events;
    steps_.packed_unit = call.packed_unit;
    steps_.memory.resize(layout.slots());
  }

  Steps compile() {
    const std::vector<Op>& ops = call_.plan->ops;
    const std::size_t join = plan::join_begin(*call_.plan);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      in_join_ = i >= join;
      add(ops[i]);
      steps_.of_op.push_back(is_empty(ops[i]) ? -1 : static_cast<int>(steps_.steps.size()) - 1);
    }
    return std::move(steps_);
  }

 private:
  void add(const Op& op) {
    switch (op.kind) {
      case Kind::Gemm:
        return gemm(op);
      case Kind::Put:
      case Kind::Copy:
        return copy(op);
      case Kind::Quantise:
        return quantise(op);
      case Kind::Reduce:
        return reduce(op);
      case Kind::Notify:
        return notify(op);
      case Kind::Await:
        return await(op);
      case Kind::Record:
        append(Step::Kind::Record, op.stream).event = op.event;
        return;
      case Kind::Wait:
        append(Step::Kind::Wait, op.stream).event = op.event;
        return;
    }
  }

  Step& append(Step::Kind kind, plan::Stream stream) {
    Step step;
    step.kind = kind;
    step.stream = stream;
    step.join = in_join_;
    if (stream != plan::kMain) steps_.streams |= 1u << stream;
    steps_.steps.push_back(step);
    steps_.compute_streams = std::max(steps_.compute_streams, stream - plan::kCompute + 1);
    return steps_.steps.back();
  }

  // A chunk with nothing in it, which happens where a shard has fewer rows than chunks.
  bool is_empty(const Op& op) const { return !op.writes.empty() && block(op.writes[0]).rows.count == 0; }

  // Null for an empty chunk.
  Step* data_step(Step::Kind kind, const Op& op) {
    if (is_empty(op)) return nullptr;
    const Block d = block(op.writes[0]);
    Step& step = append(kind, op.stream);
    step.d = address(op.writes[0]);
    step.rows = d.rows.count;
    step.output_row = d.shard * call_.shard_rows + d.rows.begin;
    step.bytes = d.bytes();
    return &step;
  }

  void gemm(const Op& op) {
    Step* step = data_step(Step::Kind::Gemm, op);
    if (!step) return;
    step->a = address(op.reads[0]);
    step->a_row_bytes = block(op.reads[0]).row_bytes;
    if (op.scales()) step->scales = address(*op.scales());
    if (op.c()) step->c = address(*op.c());
    step->bias = op.bias;
    steps_.workspaces = std::max(steps_.workspaces, op.stream - plan::kCompute + 1);
  }

  void copy(const Op& op) {
    if (Step* step = data_step(Step::Kind::Copy, op)) step->a = address(op.reads[0]);
  }

  void quantise(const Op& op) {
    Step* step = data_step(Step::Kind::Quantise, op);
    if (!step) return;
    step->a = address(op.reads[0]);
    step->a_bytes = block(op.reads[0]).bytes();
  }

  void reduce(const Op& op) {
    Step* step = data_step(Step::Kind::Reduce, op);
    if (!step) return;
    step->first = static_cast<int>(steps_.terms.size());
    step->count = static_cast<int>(op.reads.size());
    for (std::size_t i = 0; i < op.reads.size(); ++i) {
      steps_.terms.push_back(address(op.reads[i]));
      if (block(op.reads[i]).packed) step->packed_terms |= std::uint64_t{1} << i;
    }
  }

  void notify(const Op& op) {
    if (op.flag.kind == FlagKind::Empty && !std::exchange(received_, true)) {
      set_running(op.stream, call_.signature | kReceived);
    }
    memory(op.stream, [&](int slot) { return write_value(flag(op.flag, slot), set_value(op.flag, call_.signature)); });
  }

  void await(const Op& op) {
    steps_.awaited.push_back(op.flag);
    memory(op.stream, [&](int slot) { return wait_value(flag(op.flag, slot), set_value(op.flag, call_.signature)); });
    memory(op.stream, [&](int slot) { return write_value(flag(op.flag, slot), 0); });
  }

  void set_running(plan::Stream stream, std::uint32_t value) {
    memory(stream, [&](int slot) {
      return write_value(controls_.word(call_.plan->rank, layout_.running_offset(slot)), value);
    });
  }

  CUdeviceptr flag(const plan::Flag& flag, int slot) const {
    return controls_.word(flag.owner(), layout_.flag_offset(slot, flag));
  }

  // What follows at once on the same stream joins the batch: no other stream is issued in between, so the plan's issue
  // order stays as it is.
  template <class OpOfSlot>
  void memory(plan::Stream stream, const OpOfSlot& op_of_slot) {
    const bool joins = !steps_.steps.empty() && steps_.steps.back().kind == Step::Kind::Memory &&
                       steps_.steps.back().stream == stream && steps_.steps.back().count < kMaxBatch;
    Step& step = joins ? steps_.steps.back() : append(Step::Kind::Memory, stream);
    if (!joins) step.first = static_cast<int>(steps_.memory[0].size());
    ++step.count;
    for (int slot = 0; slot < layout_.slots(); ++slot) steps_.memory[slot].push_back(op_of_slot(slot));
  }

  Block block(const plan::Region& region) const { return block_of(call_, region, nullptr); }

  Address address(const plan::Region& region) const {
    const plan::Buffer own = plan::in_scratch(region.buffer) ? plan::Buffer::Scratch : region.buffer;
    const int base = plan::in_slot(region.buffer) ? kSlotOf + region.rank : static_cast<int>(own);
    return {base, reinterpret_cast<std::intptr_t>(block(region).data)};
  }

  const Call& call_;
  const Layout& layout_;
  const RegisteredControls& controls_;
  Steps steps_;
  bool in_join_ = false;
  bool received_ = false;
};

}  // namespace

Steps compile(const Call& call, const Layout& layout, const RegisteredControls& controls) {
  require_recorded_events(*call.plan);
  return Compiler(call, layout, controls).compile();
}

}  // namespace streamoverlap::cuda
