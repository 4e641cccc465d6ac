// The searches that interpret() is made of. Each adds what it finds to the report.
#pragma once

#include "interpreter.h"
#include "machine.h"

namespace streamoverlap::interpreter {

bool add(Report&, const Limits&, std::string breakage);  // false: that is enough

void every_interleaving(const Program&, const Limits&, Report&);
void delays(const Program&, const Limits&, Report&);
void random_schedules(const Program&, const Limits&, Report&);
void one_queue(const Calls&, const Limits&, Report&);
void topological_orders(const Program&, const Limits&, Report&);

// Two conflicting accesses that could both run now.
std::optional<std::string> torn(const Program&, const std::vector<int>& movable);
void movable_steps(const Program&, const Machine&, const Word* state, std::vector<int>& steps);

}  // namespace streamoverlap::interpreter
