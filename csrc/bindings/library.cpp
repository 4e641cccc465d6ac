// The ops as torch.ops.streamoverlap.*: schemas alone. What they do, on the CPU and on CUDA, for fake tensors and in a
// backward pass, is registered by streamoverlap/library.py.
//
// A group travels as its name and a plan as text (PlanSpec.to_text), as a compiler knows only values. precision is what
// products are taken in, by the names of streamoverlap/precision.py: arguments and results are no float8, which an op
// makes inside. No argument has a default: the dispatcher of torch 2.11 hides those from the formulas of gradients.
// None of them writes its arguments or returns views of them, so that a compiler may keep them in order by effects.
#include <torch/library.h>

TORCH_LIBRARY(streamoverlap, m) {
  m.set_python_module("streamoverlap.library");
  m.def(
      "all_gather_gemm(Tensor x, Tensor[] weights, Tensor[] biases, str group_name, bool return_gathered, "
      "str plan, str precision) -> Tensor[]");
  m.def(
      "gemm_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str group_name, str plan, str precision) -> Tensor");
  m.def("gemm_all_reduce(Tensor x, Tensor weight, Tensor? bias, str group_name, str plan, str precision) -> Tensor");
  m.def("all_gather(Tensor x, str group_name, str plan) -> Tensor");
  m.def("reduce_scatter(Tensor x, str group_name, str plan) -> Tensor");
  m.def("all_reduce(Tensor x, str group_name, str plan) -> Tensor");

  // Of a product whose x is the same on all ranks: exchanges in the backward pass alone.
  m.def("column_linear(Tensor x, Tensor weight, Tensor? bias, str group_name, str plan, str precision) -> Tensor");

  // The gradients that are needed of x, of the weights and of the biases, in this order. x_is: what was kept of x, its
  // own "shard", the "gathered" whole, or x itself where it is "replicated".
  m.def(
      "column_backward(Tensor[] grads, Tensor? x, str x_is, Tensor[] weights, bool needs_x, bool[] needs_weights, "
      "bool[] needs_biases, str group_name, str plan, str precision) -> Tensor[]");
}
