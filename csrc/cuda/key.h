// Keys of caches that are looked up in every call: plain integers, compared and hashed without following a pointer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace streamoverlap::cuda {

template <std::size_t n>
using Key = std::array<std::int64_t, n>;

struct KeyHash {
  template <std::size_t n>
  std::size_t operator()(const Key<n>& key) const {
    std::uint64_t hash = 0;
    for (const std::int64_t value : key) {
      hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

}  // namespace streamoverlap::cuda
