// What happens before what, as vector clocks over chains.
#pragma once

#include <vector>

#include "graph.h"

namespace streamoverlap::plan {

enum class Edges {
  All,    // streams, Record -> Wait, Notify -> Await
  Local,  // the same without Notify -> Await: what a rank alone knows
};

class Clocks {
 public:
  Clocks(const Graph&, Edges);
  // `order`: all nodes, each after what it follows. Nodes marked in `dropped` are Waits taken as not there.
  void compute(const std::vector<int>& order, const std::vector<char>* dropped = nullptr);

  // With local edges, a and b must be of one rank.
  bool before(int a, int b) const;
  bool before_or_same(int a, int b) const { return a == b || before(a, b); }

 private:
  int column(int chain, int rank) const { return edges_ == Edges::All ? chain : chain - graph_->first_chain[rank]; }

  const Graph* graph_;
  Edges edges_;
  int width_ = 0;
  // Along a chain the clock changes only where an edge comes in, so the nodes between share one row. An entry counts
  // the nodes of a chain that come before.
  std::vector<int> row_of_;
  std::vector<int> rows_;
};

}  // namespace streamoverlap::plan
