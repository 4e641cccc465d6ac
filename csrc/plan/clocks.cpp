#include "clocks.h"

#include <algorithm>

namespace streamoverlap::plan {

Clocks::Clocks(const Graph& graph, Edges edges) : graph_(&graph), edges_(edges), row_of_(graph.nodes.size()) {
  width_ = static_cast<int>(graph.chains.size());
  if (edges == Edges::All) return;
  width_ = 0;
  for (int rank = 0; rank < graph.world; ++rank) {
    width_ = std::max(width_, graph.first_chain[rank + 1] - graph.first_chain[rank]);
  }
}

void Clocks::compute(const std::vector<int>& order, const std::vector<char>* dropped) {
  rows_.assign(width_, 0);
  int rows = 1;
  for (const int id : order) {
    const Node& node = graph_->nodes[id];
    const int previous = graph_->previous(id);
    int row = previous < 0 ? 0 : row_of_[previous];
    const bool follows =
        node.source >= 0 && (edges_ == Edges::All || !node.is(Kind::Await)) && !(dropped && (*dropped)[id]);
    if (follows) {
      const Node& source = graph_->nodes[node.source];
      const int from = column(source.chain, source.rank);
      if (rows_[static_cast<std::size_t>(row) * width_ + from] <= source.position) {
        rows_.resize(static_cast<std::size_t>(rows + 1) * width_);
        const int* own = &rows_[static_cast<std::size_t>(row) * width_];
        const int* other = &rows_[static_cast<std::size_t>(row_of_[node.source]) * width_];
        int* merged = &rows_[static_cast<std::size_t>(rows) * width_];
        for (int i = 0; i < width_; ++i) merged[i] = std::max(own[i], other[i]);
        merged[from] = source.position + 1;
        row = rows++;
      }
    }
    row_of_[id] = row;
  }
}

bool Clocks::before(int a, int b) const {
  const Node& first = graph_->nodes[a];
  const Node& second = graph_->nodes[b];
  if (first.chain == second.chain) return first.position < second.position;
  return rows_[static_cast<std::size_t>(row_of_[b]) * width_ + column(first.chain, first.rank)] > first.position;
}

}  // namespace streamoverlap::plan
