// The plans of one or more consecutive calls as one graph: a node for every op, and for every call and rank three that
// stand for what the caller does: Begin before the call, Issued once it is issued, End after the join.
#pragma once

#include <string>
#include <vector>

#include "check.h"
#include "plan.h"

namespace streamoverlap::plan {

using Calls = std::vector<std::vector<Plan>>;  // calls[k][r]: what rank r runs in call k

struct Node {
  enum class Type : std::uint8_t { Begin, Op, Issued, End };
  Type type = Type::Op;
  const Op* op = nullptr;  // none for what is the caller's
  int call = 0, rank = 0;
  int chain = 0, position = 0;
  // Wait: its Record; Await: the Notify that releases it, -1 where the first state of the flag does; Begin: the End of
  // the call before on the slot.
  int source = -1;

  bool is(Kind kind) const { return op && op->kind == kind; }
  bool works() const { return op && op->kind < Kind::Record; }
};

// All uses of a flag, in issue order over all calls: notifies are uses[first, middle), awaits uses[middle, last).
struct FlagUses {
  Flag flag;
  int first = 0, middle = 0, last = 0;
};

// A node reads or writes a region. A Put, or a Gemm that stores, reads at its own rank and writes at a peer.
struct Access {
  int region = 0;
  int node = 0;
  bool write = false;
};

// Keeps pointers into the plans it is made of, which must be well formed (see malformed.h).
class Graph {
 public:
  explicit Graph(const Calls& calls);

  const Calls& calls;
  const int world;
  std::vector<Node> nodes;
  // A chain is a stream of a rank, which runs in order. Main goes on over all calls; every other stream is a chain of
  // its own in each call, since there its Waits alone order it. So is the join, with End, since whoever needs the
  // result may join on any stream. That the next Begin comes after it stands for the executor, which waits for what the
  // join waits for, joined or not; as End touches only what is the caller's in its own call, it does no harm there.
  std::vector<std::vector<int>> chains;
  std::vector<int> first_chain;  // of each rank, and one past the last of all

  std::vector<FlagUses> flags;
  std::vector<int> uses;
  std::vector<int> never_set;   // Awaits without a Notify
  std::vector<int> unrecorded;  // Waits without a Record before them
  std::vector<int> recorded_twice;
  std::vector<Access> accesses;  // by region

  int begin(int call, int rank) const { return begins_[call * world + rank]; }
  // Ops are the nodes between begin() and issued(), in issue order.
  int issued(int call, int rank) const {
    return begin(call, rank) + 1 + static_cast<int>(calls[call][rank].ops.size());
  }
  int end(int call, int rank) const { return issued(call, rank) + 1; }
  int previous(int node) const;  // in its chain, -1 for the first

  int regions() const { return region_bases_.back(); }
  int region_id(int call, const Region& region) const;
  int regions_of_buffer(int call) const;  // of a rank, with numbers in a row
  Region region(int id) const;
  int call_of_region(int id) const;

  std::string describe(int node) const;
  std::vector<Place> places(const std::vector<int>& nodes) const;  // of those that are ops

 private:
  void add_rank(int rank);
  int add_node(Node::Type type, const Op* op, int call, int rank, int chain);
  void match_flags();
  void list_accesses();

  std::vector<int> begins_;
  std::vector<int> region_bases_;
};

}  // namespace streamoverlap::plan
