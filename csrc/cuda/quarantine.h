// Slots of aborted communicators. A peer that was only slow may still write to them, so they are given back only once
// all peers have closed their communicators. A peer that is gone never says so: what it might write to is lost on
// purpose, as nothing tells its end from a long sleep.
#pragma once

#include <memory>
#include <vector>

#include "../group/group.h"

namespace streamoverlap::cuda {

void quarantine(const Group& group, std::vector<std::vector<std::shared_ptr<void>>> slots);
// Gives back what no peer can write to any more.
void sweep_quarantine();

}  // namespace streamoverlap::cuda
