#include "plan.h"

#include <algorithm>

#include "builders.h"

namespace streamoverlap::plan {
namespace {

std::string pad(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

std::string join(const std::vector<Region>& regions) {
  std::string text;
  for (const Region& region : regions) text += (text.empty() ? "" : " + ") + to_string(region);
  return text;
}

}  // namespace

std::size_t join_begin(const Plan& plan) {
  const auto joins = [](const Op& op) { return op.stream == kMain && op.kind == Kind::Wait; };
  return static_cast<std::size_t>(std::find_if(plan.ops.begin(), plan.ops.end(), joins) - plan.ops.begin());
}

int slot_shards(const Spec& spec) {
  return reduces_all(spec) && (spec.algorithm == Algorithm::Direct || spec.quantised) ? 2 * spec.world : spec.world;
}

int data_shard(const Spec& spec, const Region& region) {
  if (!in_slot(region.buffer) || gathers(spec)) return region.shard;
  if (region.shard >= spec.world) return region.shard - spec.world;
  return spec.algorithm == Algorithm::Direct ? region.rank : region.shard;
}

bool is_packed(const Spec& spec, const Region& region) {
  if (!spec.quantised) return false;
  return region.buffer == Buffer::Packed || (region.buffer == Buffer::Slot && region.shard < spec.world);
}

const char* name(Operation value) {
  constexpr const char* names[] = {"all_gather_gemm", "gemm_reduce_scatter", "all_gather",
                                   "reduce_scatter",  "all_reduce",          "gemm_all_reduce"};
  return names[static_cast<int>(value)];
}

const char* name(Algorithm value) { return value == Algorithm::Ring ? "ring" : "direct"; }

const char* name(Reduction value) { return value == Reduction::Accumulate ? "accumulate" : "sum"; }

const char* name(Transfer value) { return value == Transfer::Copy ? "copy" : "store"; }

const char* name(Taper value) {
  constexpr const char* names[] = {"none", "first", "last", "both"};
  return names[static_cast<int>(value)];
}

const char* name(Buffer value) {
  constexpr const char* names[] = {"input",  "output", "gathered",    "slot",  "scratch",
                                   "copied", "scales", "slot_scales", "packed"};
  return names[static_cast<int>(value)];
}

const char* name(Kind value) {
  constexpr const char* names[] = {"gemm", "put", "copy", "quantise", "reduce", "notify", "await", "record", "wait"};
  return names[static_cast<int>(value)];
}

std::string name(Stream stream) {
  constexpr const char* names[] = {"main", "send", "recv"};
  return stream < kCompute ? names[stream] : "compute" + std::to_string(stream - kCompute);
}

std::string to_string(const Spec& spec) {
  std::string text = std::string(name(spec.operation)) + "(" + name(spec.algorithm) +
                     ", world=" + std::to_string(spec.world) + ", chunks=" + std::to_string(spec.chunks) +
                     ", compute_streams=" + std::to_string(spec.compute_streams);
  if (multiplies(spec) && !gathers(spec)) text += std::string(", reduce=") + name(spec.reduction);
  if (spec.transfer == Transfer::Store) text += ", transfer=store";
  if (spec.taper != Taper::None) text += std::string(", taper=") + name(spec.taper);
  if (spec.keep_gathered) text += ", keep_gathered";
  if (spec.copy_input) text += ", copy_input";
  if (spec.scaled) text += ", scaled";
  if (spec.quantised) text += ", quantised";
  return text + ")";
}

std::string to_string(const Region& region) {
  return std::string(name(region.buffer)) + "@" + std::to_string(region.rank) + "[" + std::to_string(region.shard) +
         "." + std::to_string(region.chunk) + "]";
}

std::string to_string(const Flag& flag) {
  const std::string pair = std::to_string(flag.sender) + "->" + std::to_string(flag.receiver);
  return flag.kind == FlagKind::Full ? "full(" + pair + ", " + std::to_string(flag.index) + ")" : "empty(" + pair + ")";
}

std::string to_string(const Op& op) {
  std::string text = pad(name(op.kind), 6) + " ";
  switch (op.kind) {
    case Kind::Gemm:
      if (op.reads.empty()) return text + "nothing";
      text += join(op.writes) + " = " + to_string(op.reads[0]);
      if (op.scales()) text += " * " + to_string(*op.scales());
      text += " W^T";
      if (op.c()) text += " + " + to_string(*op.c());
      return op.bias ? text + " + bias" : text;
    case Kind::Put:
    case Kind::Copy:
    case Kind::Quantise:
    case Kind::Reduce:
      return text + join(op.writes) + " = " + join(op.reads);
    case Kind::Notify:
    case Kind::Await:
      return text + to_string(op.flag);
    case Kind::Record:
    case Kind::Wait:
      return text + "event " + std::to_string(op.event);
  }
  return text;
}

std::string to_string(const Plan& plan) {
  std::string text = to_string(plan.spec) + ", rank " + std::to_string(plan.rank) + "\n";
  const std::size_t join = join_begin(plan);
  for (std::size_t i = 0; i < plan.ops.size(); ++i) {
    const Op& op = plan.ops[i];
    std::string number = std::to_string(i);
    text += std::string(number.size() < 4 ? 4 - number.size() : 0, ' ') + number + "  " + pad(name(op.stream), 9) +
            " " + to_string(op) + (op.stream == kMain && i >= join ? "  (join)" : "") + "\n";
  }
  return text;
}

}  // namespace streamoverlap::plan
