#include "malformed.h"

#include <cstddef>
#include <string>

#include "builders.h"

namespace streamoverlap::plan {
namespace {

constexpr int kMostEvents = 1 << 20;  // far above any plan; bounds the memory that a broken one can ask for

bool within(int value, int low, int high) { return value >= low && value <= high; }

std::string outside(const std::string& what, int value, int low, int high) {
  return what + " is " + std::to_string(value) + ", expected " + std::to_string(low) + " to " + std::to_string(high);
}

// Each returns what is wrong, nothing where all is well.
std::string wrong_stream(const Spec& spec, const Op& op) {
  const Stream last = kCompute + spec.compute_streams - 1;
  if (!within(op.stream, 0, last)) return outside("its stream", op.stream, 0, last);
  const bool send = op.stream == kSend, recv = op.stream == kRecv, compute = op.stream >= kCompute;
  switch (op.kind) {
    case Kind::Gemm:
    case Kind::Reduce:
      return compute ? "" : "it is on " + name(op.stream) + ", expected a compute stream";
    case Kind::Put:
      return send ? "" : "it is on " + name(op.stream) + ", expected send";
    case Kind::Quantise:
      return send || compute ? "" : "it is on " + name(op.stream) + ", expected send or a compute stream";
    case Kind::Copy:
      return send || op.stream == kMain ? "" : "it is on " + name(op.stream) + ", expected main or send";
    case Kind::Notify:
    case Kind::Await:
      return send || recv ? "" : "it is on " + name(op.stream) + ", expected send or recv";
    case Kind::Record:
    case Kind::Wait:
      return "";
  }
  return "its kind is unknown";
}

std::string wrong_region(const Spec& spec, const Region& region) {
  if (static_cast<int>(region.buffer) >= kBuffers) return "a region is of an unknown buffer";
  if (!within(region.rank, 0, spec.world - 1)) return outside("the rank of a region", region.rank, 0, spec.world - 1);
  const Shards shards = shards_of(spec, region.buffer, region.rank);
  if (!within(region.shard, shards.first, shards.last - 1)) {
    return outside("the shard of " + to_string(region), region.shard, shards.first, shards.last - 1);
  }
  if (!within(region.chunk, 0, spec.chunks - 1)) {
    return outside("the chunk of " + to_string(region), region.chunk, 0, spec.chunks - 1);
  }
  if (is_scales(region.buffer) && !(spec.scaled && (region.buffer == Buffer::Scales || gathers(spec)))) {
    return to_string(region) + ": the plan has no such scales";
  }
  if (region.buffer == Buffer::Packed && !spec.quantised) return to_string(region) + ": the plan packs nothing";
  if (region.buffer == Buffer::Gathered && !spec.keep_gathered) return "the plan keeps no gathered input";
  if (region.buffer == Buffer::Copied && !(spec.copy_input && copy_of_input(spec) == Buffer::Copied)) {
    return "the plan has no copy of the input apart from its output";
  }
  return "";
}

std::string wrong_count(const Spec& spec, const Op& op) {
  const std::size_t reads = op.reads.size(), writes = op.writes.size();
  const auto expected = [&](const char* what) {
    return "it has " + std::to_string(reads) + " reads and " + std::to_string(writes) + " writes, expected " + what;
  };
  switch (op.kind) {
    case Kind::Gemm:
      if (spec.scaled)
        return within(static_cast<int>(reads), 2, 3) && writes == 1 ? "" : expected("2 or 3 reads and 1 write");
      return within(static_cast<int>(reads), 1, 2) && writes == 1 ? "" : expected("1 or 2 reads and 1 write");
    case Kind::Put:
    case Kind::Copy:
    case Kind::Quantise:
      return reads == 1 && writes == 1 ? "" : expected("1 read and 1 write");
    case Kind::Reduce:
      return reads >= 1 && writes == 1 ? "" : expected("1 read or more and 1 write");
    default:
      return reads == 0 && writes == 0 ? "" : expected("none");
  }
}

// Rows of fewer bits where others are expected, or the other way round.
std::string wrong_packing(const Spec& spec, const Op& op) {
  const auto is = [&](const Region& region, bool expected, const char* does) -> std::string {
    if (is_packed(spec, region) == expected) return "";
    return std::string("it ") + does + " " + to_string(region) + ", expected a region that is " +
           (expected ? "packed" : "not packed");
  };
  const bool puts = op.kind == Kind::Put, packs = op.kind == Kind::Quantise;
  const std::string wrong = is(op.writes[0], packs || (puts && is_packed(spec, op.reads[0])), "writes");
  if (!wrong.empty() || puts || op.kind == Kind::Reduce) return wrong;
  for (const Region& region : op.reads) {
    const std::string wrong_read = is(region, false, "reads");
    if (!wrong_read.empty()) return wrong_read;
  }
  return "";
}

std::string wrong_data(const Spec& spec, const Op& op, int rank) {
  for (const auto* regions : {&op.reads, &op.writes}) {
    for (const Region& region : *regions) {
      const std::string wrong = wrong_region(spec, region);
      if (!wrong.empty()) return wrong;
    }
  }
  for (const Region& region : op.reads) {
    if (region.rank != rank) return "it reads " + to_string(region) + ", expected a region of its own rank";
  }
  const Region& target = op.writes[0];
  const bool peers_slot = in_slot(target.buffer) && target.rank != rank;
  const bool stores =
      op.kind == Kind::Gemm && spec.transfer == Transfer::Store && peers_slot && !is_scales(target.buffer);
  if (op.kind == Kind::Put) {
    if (!peers_slot) return "it writes " + to_string(target) + ", expected the slot of a peer";
  } else if (!stores && (target.rank != rank || target.buffer == Buffer::Input || is_scales(target.buffer))) {
    return "it writes " + to_string(target) + ", expected a region of its own rank other than the input and scales";
  }
  if (op.kind == Kind::Gemm && spec.scaled && !op.scales()) {
    return "it reads " + to_string(op.reads[1]) + " after its first factor, expected scales";
  }
  // Main does not wait for the last call on the slot, so it must touch nothing that is not this call's alone.
  const bool shared = in_slot(target.buffer) || in_scratch(target.buffer);
  if (op.stream == kMain && (op.reads[0].buffer != Buffer::Input || shared)) {
    return "main copies " + to_string(op.reads[0]) + " to " + to_string(target) +
           ", expected the input to what is the call's own";
  }
  if ((op.kind == Kind::Gemm || op.kind == Kind::Copy) && op.reads[0] == target) {
    return "it writes " + to_string(target) + ", which it reads";
  }
  if (op.bias && op.kind != Kind::Gemm) return "it adds a bias, expected only of a gemm";
  return wrong_packing(spec, op);
}

std::string wrong_flag(const Spec& spec, const Op& op, int rank) {
  const Flag& flag = op.flag;
  if (!within(flag.sender, 0, spec.world - 1)) return outside("the sender", flag.sender, 0, spec.world - 1);
  if (!within(flag.receiver, 0, spec.world - 1)) return outside("the receiver", flag.receiver, 0, spec.world - 1);
  if (flag.sender == flag.receiver) return "sender and receiver are both rank " + std::to_string(flag.sender);
  const int last = flag.kind == FlagKind::Full ? full_flags_per_pair(spec.world) - 1 : 0;
  if (!within(flag.index, 0, last)) return outside("the index of the flag", flag.index, 0, last);
  const int actor = op.kind == Kind::Notify ? flag.setter() : flag.owner();
  if (actor != rank) return "only rank " + std::to_string(actor) + " may do that";
  return "";
}

std::string wrong_op(const Spec& spec, const Op& op, int rank, int events) {
  std::string wrong = wrong_stream(spec, op);
  if (wrong.empty()) wrong = wrong_count(spec, op);
  if (!wrong.empty()) return wrong;
  if (op.is_data()) return wrong_data(spec, op, rank);
  if (op.kind == Kind::Notify || op.kind == Kind::Await) return wrong_flag(spec, op, rank);
  if (!within(op.event, 0, events - 1)) return outside("its event", op.event, 0, events - 1);
  return "";
}

void check_plan(const Plan& plan, int call, const std::string& where, Report& report) {
  for (std::size_t i = 0; i < plan.ops.size(); ++i) {
    const Op& op = plan.ops[i];
    const std::string wrong = wrong_op(plan.spec, op, plan.rank, plan.events);
    if (wrong.empty()) continue;
    const bool event = !op.is_data() && op.kind >= Kind::Record && within(op.stream, 0, kMaxStreams - 1);
    const std::string stream =
        within(op.stream, 0, kMaxStreams - 1) ? name(op.stream) : "stream " + std::to_string(op.stream);
    report.add(event ? FaultKind::UnrecordedEvent : FaultKind::Malformed,
               where + " " + stream + " [" + to_string(op) + "]: " + wrong, {{call, plan.rank, static_cast<int>(i)}});
  }
}

}  // namespace

void check_form(const Calls& calls, Report& report) {
  const std::size_t world = calls.empty() ? 0 : calls.front().size();
  for (std::size_t call = 0; call < calls.size(); ++call) {
    const std::string prefix = calls.size() > 1 ? "call " + std::to_string(call) + ": " : "";
    if (calls[call].empty() || calls[call].size() != world) {
      report.add(FaultKind::Malformed, prefix + "there are " + std::to_string(calls[call].size()) +
                                           " plans, expected one for each rank" +
                                           (call ? ", as many as in call 0: " + std::to_string(world) : ""));
      return;
    }
    const Spec& spec = calls[call].front().spec;
    std::string wrong = wrong_spec(spec);
    for (std::size_t rank = 0; rank < world && wrong.empty(); ++rank) {
      const Plan& plan = calls[call][rank];
      if (plan.spec != spec) {
        wrong =
            "rank " + std::to_string(rank) + " runs " + to_string(plan.spec) + ", but rank 0 runs " + to_string(spec);
      } else if (plan.rank != static_cast<int>(rank) || spec.world != static_cast<int>(world)) {
        wrong = "plan " + std::to_string(rank) + " of " + std::to_string(world) + " is that of rank " +
                std::to_string(plan.rank) + " of " + std::to_string(spec.world);
      } else if (!within(plan.events, 0, kMostEvents)) {
        wrong = outside("events of rank " + std::to_string(rank), plan.events, 0, kMostEvents);
      }
    }
    if (!wrong.empty()) {
      report.add(FaultKind::Malformed, prefix + wrong);
      continue;
    }
    for (const Plan& plan : calls[call]) {
      check_plan(plan, static_cast<int>(call), prefix + "rank " + std::to_string(plan.rank), report);
    }
  }
}

}  // namespace streamoverlap::plan
