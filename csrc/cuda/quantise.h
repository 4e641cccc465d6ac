// Rows of float8_e4m3fn, each with the scale that its elements share.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "reduce.h"

namespace streamoverlap::cuda {

struct QuantisedRows {
  void* values = nullptr;
  std::int64_t row_bytes = 0;  // from one row to the next
  void* scales = nullptr;      // float32
  std::int64_t scale_bytes = 0;
};

// Of `elements` elements in rows of `row`, the last of which may be shorter: scale = largest / 448, value = element *
// (1 / scale), each rounded to nearest. Infinite elements and NaN become NaN and leave the scale alone, which is never
// below the smallest normal float32.
void quantise(const void* from, std::int64_t elements, std::int64_t row, const QuantisedRows& to, at::ScalarType dtype,
              cudaStream_t stream);

// As reduce(), but the terms whose bit is set in `packed` are packed in rows of `row` (see packed_row_bytes).
void reduce_packed(const Terms& terms, std::uint64_t packed, void* sum, std::int64_t elements, std::int64_t row,
                   at::ScalarType dtype, cudaStream_t stream);

// Loads what quantise() and reduce_packed() may launch; see load_reduce().
void load_quantise(at::ScalarType dtype);

}  // namespace streamoverlap::cuda
