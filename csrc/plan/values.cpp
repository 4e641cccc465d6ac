#include "values.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "builders.h"

namespace streamoverlap::plan {
namespace {

// A chunk of some rank's input, as it is or multiplied by the weight of that rank (and by its scales, where it has
// some); or those scales.
enum class Of : std::uint8_t { Input, Product, Scales };
struct Term {
  Of of;
  std::uint8_t rank, shard, chunk;
  auto tie() const { return std::tie(of, rank, shard, chunk); }
};

struct Value {
  bool written = false;
  int biases = 0;
  std::vector<Term> terms;  // of a sum, sorted
};

Term term(Of of, int rank, int shard, int chunk) {
  const auto byte = [](int value) { return static_cast<std::uint8_t>(value); };
  return {of, byte(rank), byte(shard), byte(chunk)};
}

std::string text(const Term& term) {
  const Buffer buffer = term.of == Of::Scales ? Buffer::Scales : Buffer::Input;
  return std::string(term.of == Of::Product ? "the product of " : "") +
         to_string(Region{buffer, term.rank, term.shard, term.chunk});
}

std::string text(const Value& value) {
  if (value.terms.empty()) return value.biases ? "a bias" : "nothing";
  std::string sum;
  for (const Term& term : value.terms) sum += (sum.empty() ? "" : " + ") + text(term);
  return sum + (value.biases ? " + bias" : "");
}

class Evaluation {
 public:
  Evaluation(const Graph& graph, Report& report) : g_(graph), report_(report), values_(graph.regions()) {}

  void run(const std::vector<int>& order) {
    for (const int id : order) {
      const Node& node = g_.nodes[id];
      if (node.type == Node::Type::Begin) begin(node);
      if (node.type == Node::Type::Issued) issued(node);
      if (node.type == Node::Type::Op && node.op->is_data()) compute(id, *node.op);
      if (node.type == Node::Type::End) end(node);
    }
  }

 private:
  const Spec& spec_of(const Node& node) const { return g_.calls[node.call][node.rank].spec; }
  Value& at(const Node& node, const Region& region) { return values_[g_.region_id(node.call, region)]; }

  void wrong(std::string message, const std::vector<int>& nodes = {}) {
    report_.add(FaultKind::WrongValue, std::move(message), g_.places(nodes));
  }

  void begin(const Node& node) {
    fill(node, Buffer::Input, Of::Input);
    if (spec_of(node).scaled) fill(node, Buffer::Scales, Of::Scales);
  }

  void fill(const Node& node, Buffer buffer, Of of) {
    for_each_chunk(node, buffer, [&](const Region& region) {
      Value& value = at(node, region);
      value.written = true;
      value.terms = {term(of, node.rank, region.shard, region.chunk)};
    });
  }

  // Where the input is copied, the caller has other data in it from here on.
  void issued(const Node& node) {
    if (!spec_of(node).copy_input) return;
    for_each_chunk(node, Buffer::Input, [&](const Region& region) { at(node, region) = Value{}; });
  }

  template <class Visit>
  void for_each_chunk(const Node& node, Buffer buffer, Visit visit) const {
    const Shards shards = shards_of(spec_of(node), buffer, node.rank);
    for (int shard = shards.first; shard < shards.last; ++shard) {
      for (int chunk = 0; chunk < spec_of(node).chunks; ++chunk) visit(Region{buffer, node.rank, shard, chunk});
    }
  }

  void compute(int id, const Op& op) {
    const Node& node = g_.nodes[id];
    for (const Region& region : op.reads) {
      if (!at(node, region).written)
        wrong(g_.describe(id) + " reads " + to_string(region) + ", which nothing wrote", {id});
    }
    Value result;
    if (op.kind == Kind::Gemm) {
      result = product(id, at(node, op.reads[0]));
      if (op.scales()) require_scales_of(id, at(node, op.reads[0]), at(node, *op.scales()));
      if (op.c()) {
        const Value& c = at(node, *op.c());
        const auto raw = [](const Term& term) { return term.of != Of::Product; };
        if (std::any_of(c.terms.begin(), c.terms.end(), raw)) {
          wrong(g_.describe(id) + " adds " + text(c) + ", expected a sum of products", {id});
        }
        add(result, c);
      }
      result.biases += op.bias;
    } else {
      for (const Region& region : op.reads) add(result, at(node, region));
    }
    result.written = true;
    at(node, op.writes[0]) = std::move(result);
  }

  Value product(int id, const Value& a) {
    Value result;
    if (a.written && (a.terms.size() != 1 || a.terms[0].of != Of::Input || a.biases)) {
      wrong(g_.describe(id) + " multiplies " + text(a) + ", expected one chunk of an input", {id});
    }
    result.terms = a.terms;
    for (Term& term : result.terms) term.of = Of::Product;
    return result;
  }

  void require_scales_of(int id, const Value& a, const Value& scales) {
    if (!a.written || !scales.written) return;
    std::vector<Term> expected = a.terms;
    for (Term& term : expected) term.of = Of::Scales;
    if (equal(scales.terms, expected)) return;
    wrong(g_.describe(id) + " scales " + text(a) + " by " + text(scales), {id});
  }

  static bool equal(const std::vector<Term>& a, const std::vector<Term>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const Term& one, const Term& other) { return one.tie() == other.tie(); });
  }

  static void add(Value& sum, const Value& more) {
    const auto middle = static_cast<std::ptrdiff_t>(sum.terms.size());
    sum.terms.insert(sum.terms.end(), more.terms.begin(), more.terms.end());
    std::inplace_merge(sum.terms.begin(), sum.terms.begin() + middle, sum.terms.end(), less);
    sum.biases += more.biases;
  }

  static bool less(const Term& a, const Term& b) { return a.tie() < b.tie(); }

  void end(const Node& node) {
    const Spec& spec = spec_of(node);
    const bool product = multiplies(spec);
    const Of of = product ? Of::Product : Of::Input;
    std::vector<Term> expected;
    for_each_chunk(node, Buffer::Output, [&](const Region& region) {
      expected.clear();
      for (int rank = 0; rank < spec.world; ++rank) {
        if (!gathers(spec) || rank == region.shard) expected.push_back(term(of, rank, region.shard, region.chunk));
      }
      compare(node, region, expected, product ? 1 : 0);
    });
    if (!spec.keep_gathered) return;
    for_each_chunk(node, Buffer::Gathered, [&](const Region& region) {
      compare(node, region, {term(Of::Input, region.shard, region.shard, region.chunk)}, 0);
    });
  }

  void compare(const Node& node, const Region& region, const std::vector<Term>& expected, int biases) {
    const Value& value = at(node, region);
    const std::string where = g_.calls.size() > 1 ? "call " + std::to_string(node.call) + " " : "";
    if (!value.written) return wrong(where + to_string(region) + ": nothing wrote it");
    if (value.biases == biases && equal(value.terms, expected)) return;
    const auto same = [](const Term& a, const Term& b) { return a.tie() == b.tie(); };
    if (value.biases != biases) {
      wrong(where + to_string(region) + ": the bias is added " + times(value.biases) + ", expected " + times(biases));
    }
    std::vector<Term> all = expected;
    all.insert(all.end(), value.terms.begin(), value.terms.end());
    std::sort(all.begin(), all.end(), less);
    all.erase(std::unique(all.begin(), all.end(), same), all.end());
    for (const Term& term : all) {
      const auto uses = [&](const std::vector<Term>& terms) {
        return static_cast<int>(
            std::count_if(terms.begin(), terms.end(), [&](const Term& other) { return same(term, other); }));
      };
      const int used = uses(value.terms), needed = uses(expected);
      if (used == needed) continue;
      wrong(where + to_string(region) + ": " + text(term) + " is used " + times(used) + ", expected " + times(needed));
    }
  }

  const Graph& g_;
  Report& report_;
  std::vector<Value> values_;
};

}  // namespace

void check_values(const Graph& graph, const std::vector<int>& order, Report& report) {
  Evaluation(graph, report).run(order);
}

}  // namespace streamoverlap::plan
