#include "flags.h"

#include <string>
#include <vector>

namespace streamoverlap::plan {
namespace {

std::string in_call(const Graph& graph, int call) {
  return graph.calls.size() > 1 ? " in call " + std::to_string(call) : "";
}

class FlagCheck {
 public:
  FlagCheck(const Graph& graph, Report& report)
      : g_(graph), report_(report), calls_(static_cast<int>(graph.calls.size())) {}

  void run() {
    for (const FlagUses& flag : g_.flags) {
      sets_.assign(calls_, 0);
      clears_.assign(calls_, 0);
      for (int i = flag.first; i < flag.last; ++i) {
        ++(i < flag.middle ? sets_ : clears_)[g_.nodes[g_.uses[i]].call];
      }
      for (int call = 0; call < calls_; ++call) balanced(flag.flag, call);
      if (flag.flag.kind == FlagKind::Empty) {
        for (int call = 0; call < calls_; ++call) credit_[pair(call, flag.flag)] = {clears_[call], sets_[call]};
      }
    }
    uncredited();
    credits();
  }

 private:
  struct Credit {
    int taken = 0, returned = 0;
  };

  int pair(int call, const Flag& flag) const { return (call * g_.world + flag.sender) * g_.world + flag.receiver; }

  void balanced(const Flag& flag, int call) {
    if (sets_[call] == clears_[call]) return;
    report_.add(FaultKind::FlagState, to_string(flag) + " is set " + times(sets_[call]) + " and cleared " +
                                          times(clears_[call]) + in_call(g_, call) +
                                          ", expected equally often: the call must leave it " +
                                          (flag.kind == FlagKind::Full ? "clear" : "set"));
  }

  void credits() {
    for (int call = 0; call < calls_; ++call) {
      for (int sender = 0; sender < g_.world; ++sender) {
        for (int receiver = 0; receiver < g_.world; ++receiver) {
          if (sender == receiver) continue;
          const Flag flag{FlagKind::Empty, sender, receiver, 0};
          const Credit& credit = credit_[pair(call, flag)];
          expect_once("rank " + std::to_string(sender) + " takes the credit ", flag, credit.taken, call);
          expect_once("rank " + std::to_string(receiver) + " returns the credit ", flag, credit.returned, call);
        }
      }
    }
  }

  void expect_once(const std::string& what, const Flag& flag, int count, int call) {
    if (count == 1) return;
    report_.add(FaultKind::Credit, what + to_string(flag) + " " + times(count) + in_call(g_, call) + ", expected once");
  }

  void uncredited() {
    for (int id = 0; id < static_cast<int>(g_.nodes.size()); ++id) {
      const Node& node = g_.nodes[id];
      if (!node.op || !node.op->writes_peer(node.rank)) continue;
      const int to = node.op->writes[0].rank;
      if (credit_[pair(node.call, {FlagKind::Empty, node.rank, to, 0})].taken > 0) continue;
      report_.add(FaultKind::Credit,
                  g_.describe(id) + " writes to the slot of rank " + std::to_string(to) + " without its credit",
                  g_.places({id}));
    }
  }

  const Graph& g_;
  Report& report_;
  const int calls_;
  std::vector<int> sets_, clears_;  // of the flag being looked at, by call
  std::vector<Credit> credit_ = std::vector<Credit>(calls_ * g_.world * g_.world);
};

}  // namespace

void check_flags(const Graph& graph, Report& report) { FlagCheck(graph, report).run(); }

}  // namespace streamoverlap::plan
