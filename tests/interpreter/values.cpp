#include "values.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>

namespace streamoverlap::interpreter {

bool Values::Term::operator<(const Term& o) const {
  return std::tie(scale, bias, products, call, rank, shard, chunk) <
         std::tie(o.scale, o.bias, o.products, o.call, o.rank, o.shard, o.chunk);
}

Values::Values() : terms_(1) {}  // id 0 is kUnwritten

Value Values::intern(Terms terms) {
  std::sort(terms.begin(), terms.end());
  const auto [it, fresh] = ids_.try_emplace(std::move(terms), static_cast<Value>(terms_.size()));
  if (fresh) {
    if (terms_.size() > std::numeric_limits<Value>::max()) throw std::length_error("more than 65535 distinct values");
    terms_.push_back(it->first);
  }
  return it->second;
}

Value Values::raw(int call, int rank, int shard, int chunk) {
  const auto byte = [](int v) { return static_cast<std::uint8_t>(v); };
  return intern({{0, byte(call), byte(rank), byte(shard), byte(chunk), false}});
}

Value Values::scales(int call, int rank, int shard, int chunk) {
  Terms terms = terms_[raw(call, rank, shard, chunk)];
  terms[0].scale = true;
  return intern(std::move(terms));
}

Value Values::scaled(Value a, Value scales) {
  Terms own = terms_[a];
  for (Term& term : own) term.scale = true;
  return intern(own) == scales ? a : sum({a, scales});
}

Value Values::gemm(Value a, Value c, bool bias) {
  Terms terms = terms_[a];
  for (Term& term : terms)
    ++term.products;  // twice multiplied, or a multiplied bias, is a wrong value: keep it visible
  terms.insert(terms.end(), terms_[c].begin(), terms_[c].end());
  if (bias) terms.push_back({0, 0, 0, 0, 0, true});
  return intern(std::move(terms));
}

Value Values::sum(const std::vector<Value>& values) {
  Terms terms;
  for (const Value v : values) terms.insert(terms.end(), terms_[v].begin(), terms_[v].end());
  return intern(std::move(terms));
}

std::string Values::text(Value value) const {
  if (value == kUnwritten) return "nothing";
  std::string text;
  for (const Term& term : terms_[value]) {
    if (!text.empty()) text += " + ";
    for (int i = 0; i < term.products; ++i) text += "product of ";
    if (term.bias) {
      text += "bias";
    } else {
      text += std::string(term.scale ? "scales@" : "input@") + std::to_string(term.rank) + "[" +
              std::to_string(term.shard) + "." + std::to_string(term.chunk) + "] of call " + std::to_string(term.call);
    }
  }
  return text;
}

}  // namespace streamoverlap::interpreter
