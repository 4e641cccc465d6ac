// Collects faults, few enough of each kind that a broken plan stays readable.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace streamoverlap::plan {

inline std::string times(int count) { return count == 1 ? "once" : std::to_string(count) + " times"; }

class Report {
 public:
  static constexpr int kMostOfAKind = 32;

  // False where so many of this kind are reported that another would not be kept.
  bool wants(FaultKind kind) const { return counts_[static_cast<int>(kind)] < kMostOfAKind; }

  void add(FaultKind kind, std::string message, std::vector<Place> ops = {}) {
    const auto same = [&](const Fault& fault) { return fault.message == message; };
    if (!wants(kind) || std::any_of(faults_.begin(), faults_.end(), same)) return;
    ++counts_[static_cast<int>(kind)];
    faults_.push_back({kind, std::move(message), std::move(ops)});
  }

  bool empty() const { return faults_.empty(); }
  std::vector<Fault> take() { return std::move(faults_); }

 private:
  std::vector<Fault> faults_;
  std::array<int, static_cast<int>(FaultKind::Malformed) + 1> counts_{};
};

}  // namespace streamoverlap::plan
