#include "data_ops.h"

#include "check.h"
#include "reduce.h"

namespace streamoverlap::cuda {

void copy(void* to, const void* from, std::int64_t bytes, const c10::cuda::CUDAStream& stream) {
  if (bytes == 0) return;
  STREAMOVERLAP_CHECK(
      cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, stream.stream()));
}

void sum(const Steps& steps, const Step& step, void* to, const Bases& bases, at::ScalarType dtype,
         const c10::cuda::CUDAStream& stream) {
  if (step.bytes == 0) return;
  Terms terms;
  terms.count = step.count;
  for (int i = 0; i < step.count; ++i) terms.data[i] = steps.terms[step.first + i].in(bases);
  reduce(terms, to, step.bytes / static_cast<std::int64_t>(c10::elementSize(dtype)), dtype, stream.stream());
}

}  // namespace streamoverlap::cuda
