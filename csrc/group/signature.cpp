#include "signature.h"

#include "layout.h"

namespace streamoverlap {

std::uint32_t signature(const plan::Spec& spec, const std::vector<std::int64_t>& shape) {
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  const auto mix = [&hash](std::int64_t value) {  // splitmix64
    hash += static_cast<std::uint64_t>(value) + 0x9e3779b97f4a7c15;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
    hash ^= hash >> 31;
  };
  mix(static_cast<int>(spec.operation));
  mix(static_cast<int>(spec.algorithm));
  mix(static_cast<int>(spec.reduction));
  for (const int value : {spec.world, spec.chunks, spec.compute_streams}) mix(value);
  for (const bool value : {spec.keep_gathered, spec.copy_input, spec.scaled, spec.quantised}) mix(value);
  mix(static_cast<int>(spec.transfer));
  mix(static_cast<int>(spec.taper));
  for (const std::int64_t value : shape) mix(value);
  const std::uint32_t word = static_cast<std::uint32_t>(hash >> 32) & kSignatureMask;
  return word != 0 ? word : ~kSignatureMask + 1;
}

}  // namespace streamoverlap
