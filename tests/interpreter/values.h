// What a region holds, as a symbol: the multiset of everything that was summed into it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace streamoverlap::interpreter {

using Value = std::uint16_t;
inline constexpr Value kUnwritten = 0;

// Interns values, so that a region's content is one small number.
class Values {
 public:
  Values();

  Value raw(int call, int rank, int shard, int chunk);     // a chunk of the input that `rank` was given in `call`
  Value scales(int call, int rank, int shard, int chunk);  // those of that chunk
  Value gemm(Value a, Value c, bool bias);                 // a W^T + c + bias; c may be kUnwritten: no such term
  // a times its scales: a itself, if the scales are its own; a wrong value if they are not.
  Value scaled(Value a, Value scales);
  Value sum(const std::vector<Value>& terms);
  std::string text(Value) const;

 private:
  // One summand: how many times it was multiplied by W, and which input chunk, or the bias, it is.
  struct Term {
    std::uint8_t products, call, rank, shard, chunk;
    bool bias, scale = false;
    bool operator<(const Term&) const;
  };
  using Terms = std::vector<Term>;

  Value intern(Terms);

  std::map<Terms, Value> ids_;
  std::vector<Terms> terms_;
};

}  // namespace streamoverlap::interpreter
