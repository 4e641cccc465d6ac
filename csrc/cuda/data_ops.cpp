#include "data_ops.h"

#include "check.h"
#include "quantise.h"
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
  const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
  if (step.packed_terms == 0) return reduce(terms, to, step.bytes / size, dtype, stream.stream());
  reduce_packed(terms, step.packed_terms, to, step.bytes / size, steps.packed_unit / size, dtype, stream.stream());
}

void pack(const Steps& steps, const Step& step, void* to, const Bases& bases, at::ScalarType dtype,
          const c10::cuda::CUDAStream& stream) {
  const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
  const std::int64_t elements = steps.packed_unit / size;
  auto* const rows = static_cast<std::byte*>(to);
  const QuantisedRows packed = {rows, packed_row_bytes(elements), rows + packed_scale_offset(elements),
                                packed_row_bytes(elements)};
  quantise(step.a.in(bases), step.a_bytes / size, elements, packed, dtype, stream.stream());
}

}  // namespace streamoverlap::cuda
