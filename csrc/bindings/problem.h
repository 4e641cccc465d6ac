// A validated call. Errors name the argument, what it was and what was expected, and come before anything is sent.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../group/call.h"
#include "scaling.h"

namespace streamoverlap {

struct Problem {
  at::Tensor x;                                   // kept alive until the call is done
  std::vector<at::Tensor> weights;                // [N, K], row- or column-major
  std::vector<std::optional<at::Tensor>> biases;  // [N]
  std::optional<Scaling> scaling;                 // x and weights are 8-bit floats
  // One a weight; one for the plain collectives.
  std::vector<std::vector<std::int64_t>> output_sizes;
  std::vector<std::int64_t> gathered_sizes;  // where asked for
  bool copies_input = false;                 // and the output cannot take the copy

  std::vector<at::Tensor> outputs;  // these, and bases of views, from allocate() on
  at::Tensor gathered, copied;
  std::int64_t shard_rows = 0;
  Call call;                               // all but the plan's own fields: views and rows
  std::shared_ptr<const plan::Plan> plan;  // that of `call`

  // Makes x row-major, and the outputs. Apart from the checks: a rank that fails here lets its peers down.
  void allocate();
  at::ScalarType out_dtype() const { return scaling ? scaling->out_dtype : x.scalar_type(); }
  std::vector<std::int64_t> shape_key() const;  // what ranks must agree on besides the plan
  std::string description() const;              // for messages
  bool empty() const { return shard_rows == 0 || call.row_bytes(plan::Buffer::Slot) == 0; }  // nothing to exchange

 private:
  void lay_out_scales();
};

using Tensors = std::vector<at::Tensor>;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

Problem all_gather_gemm_problem(const at::Tensor& x, const Tensors& weights, const OptionalTensors& biases,
                                bool return_gathered, int world, const std::optional<Scaling>& scaling);
Problem gemm_reduce_scatter_problem(const at::Tensor& x, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias, int world,
                                    const std::optional<Scaling>& scaling, bool quantised = false);
Problem gemm_all_reduce_problem(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                int world, const std::optional<Scaling>& scaling, bool quantised = false);
Problem all_gather_problem(const at::Tensor& x, int world);
Problem reduce_scatter_problem(const at::Tensor& x, int world, bool quantised = false, bool copy_input = false);
Problem all_reduce_problem(const at::Tensor& x, int world, bool quantised = false);

}  // namespace streamoverlap
