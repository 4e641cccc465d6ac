// Steps through a program: what can move, what a step changes, and what it breaks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "program.h"
#include "values.h"

namespace streamoverlap::interpreter {

// A state is one run of words: the position in every chain, every flag, the value in every place.
using Word = std::uint16_t;
using State = std::vector<Word>;

class Machine {
 public:
  explicit Machine(const Program&);

  State initial() const;
  std::size_t words() const { return values_at_ + program_.places.size(); }

  int head(const Word* s, int chain) const {  // the next step of a chain, -1 at its end
    const std::vector<int>& steps = program_.chains[chain];
    return s[chain] < steps.size() ? steps[s[chain]] : -1;
  }
  bool done(const Word* s, int step) const { return s[program_.steps[step].chain] > program_.steps[step].index; }
  bool at_head(const Word* s, int step) const { return s[program_.steps[step].chain] == program_.steps[step].index; }
  bool enabled(const Word* s, int step) const {  // of a step at the head of its chain
    const Step& st = program_.steps[step];
    if (st.type == Step::Type::Await) return s[flags_at_ + st.flag] != 0;
    return st.record < 0 || done(s, st.record);
  }

  // Executes an enabled step. Returns what it breaks; the state is then meaningless.
  std::optional<std::string> execute(Word* s, int step);
  // In a state where nothing can move: a deadlock, or a flag that is not as it was at first.
  std::optional<std::string> halt(const Word* s) const;
  // Runs everything, up to a position in every chain, until nothing moves. Follows flags and positions only.
  void run(Word* s, const Word* limits) const;
  // Passes records and waits of a rank as far as possible.
  void settle(Word* s, int rank) const;

 private:
  std::optional<std::string> begin(Word* values, const Step&);
  void overwrite(Word* values, const Step&);
  std::optional<std::string> end(const Word* s, int step);
  std::optional<std::string> data(Word* values, int step);
  Value product(const Step&);  // of a Gemm whose reads are in in_
  Value expected(const plan::Spec&, int call, const plan::Region&);

  // What a step made of which values the last time; it is nearly always the same.
  struct Memo {
    std::vector<Value> in;
    Value out = kUnwritten;
  };

  const Program& program_;
  std::size_t flags_at_;
  std::size_t values_at_;
  Values values_;
  std::vector<Memo> memo_;
  std::vector<std::vector<Value>> expected_;  // of an End, for each of its reads
  std::vector<Value> in_;
};

}  // namespace streamoverlap::interpreter
