#include "machine.h"

#include <algorithm>

namespace streamoverlap::interpreter {

using plan::Buffer;
using plan::Kind;
using plan::Operation;
using Type = Step::Type;

Machine::Machine(const Program& program)
    : program_(program),
      flags_at_(program.chains.size()),
      values_at_(flags_at_ + program.flags.size()),
      memo_(program.steps.size()),
      expected_(program.steps.size()) {
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    if (step.type != Type::End) continue;
    const plan::Spec& spec = program.calls[step.call][step.rank].spec;
    for (const int place : step.reads) {
      expected_[i].push_back(expected(spec, step.call, program.places[place].region));
    }
  }
}

Value Machine::expected(const plan::Spec& spec, int call, const plan::Region& region) {
  const auto [buffer, rank, shard, chunk] = region;
  const bool multiplies = spec.operation == Operation::AllGatherGemm ||
                          spec.operation == Operation::GemmReduceScatter || spec.operation == Operation::GemmAllReduce;
  std::vector<Value> terms;
  if (spec.operation == Operation::AllGather || spec.operation == Operation::AllGatherGemm) {
    terms = {values_.raw(call, shard, shard, chunk)};
  } else {
    for (int j = 0; j < spec.world; ++j) terms.push_back(values_.raw(call, j, shard, chunk));
  }
  if (buffer == Buffer::Gathered || !multiplies) return values_.sum(terms);
  Value sum = kUnwritten;
  for (std::size_t i = 0; i < terms.size(); ++i) sum = values_.gemm(terms[i], sum, i == 0);
  return sum;
}

State Machine::initial() const {
  State s(words(), 0);
  for (std::size_t f = 0; f < program_.flags.size(); ++f) {
    s[flags_at_ + f] = program_.flags[f].kind == plan::FlagKind::Empty;
  }
  for (int rank = 0; rank < program_.world; ++rank) settle(s.data(), rank);
  return s;
}

void Machine::settle(Word* s, int rank) const {
  const auto [first, last] = program_.chains_of[rank];
  for (bool moved = true; moved;) {
    moved = false;
    for (int chain = first; chain < last; ++chain) {
      for (int step = head(s, chain); step >= 0; step = head(s, chain)) {
        if (!program_.steps[step].passes() || !enabled(s, step)) break;
        ++s[chain];
        moved = true;
      }
    }
  }
}

std::optional<std::string> Machine::execute(Word* s, int id) {
  const Step& step = program_.steps[id];
  for (const int other : step.earlier) {
    if (!done(s, other)) {
      return "overwritten across calls: " + program_.describe(id) + " can run before " + program_.describe(other);
    }
  }
  std::optional<std::string> broken;
  switch (step.type) {
    case Type::Begin:
      broken = begin(s + values_at_, step);
      break;
    case Type::Issued:
      overwrite(s + values_at_, step);
      break;
    case Type::End:
      broken = end(s, id);
      break;
    case Type::Data:
      broken = data(s + values_at_, id);
      break;
    case Type::Notify:
      if (s[flags_at_ + step.flag] != 0) broken = "flag set while it is already set: " + program_.describe(id);
      s[flags_at_ + step.flag] = 1;
      break;
    case Type::Await:
      s[flags_at_ + step.flag] = 0;
      break;
    case Type::Record:
    case Type::Wait:
    case Type::Join:
      break;
  }
  if (broken) return broken;
  ++s[step.chain];
  const int next = head(s, step.chain);
  if (next >= 0 && program_.steps[next].passes()) settle(s, step.rank);
  return std::nullopt;
}

std::optional<std::string> Machine::begin(Word* values, const Step& step) {
  for (const int place : step.writes) {
    const plan::Region& region = program_.places[place].region;
    const auto [buffer, rank, shard, chunk] = region;
    values[place] = buffer == Buffer::Input    ? values_.raw(step.call, rank, shard, chunk)
                    : buffer == Buffer::Scales ? values_.scales(step.call, rank, shard, chunk)
                                               : kUnwritten;
  }
  return std::nullopt;
}

void Machine::overwrite(Word* values, const Step& step) {
  for (const int place : step.writes) values[place] = kUnwritten;
}

std::optional<std::string> Machine::end(const Word* s, int id) {
  const Step& step = program_.steps[id];
  for (const int last : step.joins) {
    if (!done(s, last)) {
      return "not joined: " + program_.describe(id) + " can run before " + program_.describe(last) + " is over";
    }
  }
  for (std::size_t i = 0; i < step.reads.size(); ++i) {
    const Value value = s[values_at_ + step.reads[i]];
    if (value != expected_[id][i]) {
      return "wrong value in " + plan::to_string(program_.places[step.reads[i]].region) + " at the end of call " +
             std::to_string(step.call) + ": " + values_.text(value) + "; expected " + values_.text(expected_[id][i]);
    }
  }
  return std::nullopt;
}

std::optional<std::string> Machine::data(Word* values, int id) {
  const Step& step = program_.steps[id];
  in_.clear();
  for (const int place : step.reads) {
    if (values[place] == kUnwritten) {
      return "unwritten read of " + plan::to_string(program_.places[place].region) + ": " + program_.describe(id);
    }
    in_.push_back(values[place]);
  }
  Memo& memo = memo_[id];
  if (memo.in != in_) {
    memo.in = in_;
    switch (step.op->kind) {
      case Kind::Gemm:
        memo.out = product(step);
        break;
      case Kind::Reduce:
        memo.out = values_.sum(in_);
        break;
      default:
        memo.out = in_[0];
    }
  }
  values[step.writes[0]] = memo.out;
  return std::nullopt;
}

Value Machine::product(const Step& step) {
  const bool scaled = program_.calls[step.call][step.rank].spec.scaled;
  const std::size_t c = scaled ? 2 : 1;
  const Value a = scaled && in_.size() > 1 ? values_.scaled(in_[0], in_[1]) : in_[0];
  return values_.gemm(a, in_.size() > c ? in_[c] : kUnwritten, step.op->bias);
}

std::optional<std::string> Machine::halt(const Word* s) const {
  std::string blocked, waits;  // a Wait is blocked by what else is, unless it waits for itself
  for (std::size_t chain = 0; chain < program_.chains.size(); ++chain) {
    const int step = head(s, static_cast<int>(chain));
    if (step < 0) continue;
    std::string& list = program_.steps[step].type == Type::Wait ? waits : blocked;
    list += (list.empty() ? "" : "; ") + program_.describe(step);
  }
  if (blocked.empty()) blocked = waits;
  if (!blocked.empty()) return "deadlock, streams independent: nothing moves beyond " + blocked;
  for (std::size_t f = 0; f < program_.flags.size(); ++f) {
    const bool first = program_.flags[f].kind == plan::FlagKind::Empty;
    const bool now = s[flags_at_ + f] != 0;
    if (now != first) {
      return "flag " + plan::to_string(program_.flags[f]) + " is " + (now ? "set" : "clear") +
             " at the end; expected " + (first ? "set" : "clear");
    }
  }
  return std::nullopt;
}

void Machine::run(Word* s, const Word* limits) const {
  const int chains = static_cast<int>(program_.chains.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (int chain = 0; chain < chains; ++chain) {
      while (s[chain] < limits[chain]) {
        const int id = program_.chains[chain][s[chain]];
        if (!enabled(s, id)) break;
        const Step& step = program_.steps[id];
        if (step.flag >= 0) s[flags_at_ + step.flag] = step.type == Type::Notify;
        ++s[chain];
        moved = true;
      }
    }
  }
}

}  // namespace streamoverlap::interpreter
