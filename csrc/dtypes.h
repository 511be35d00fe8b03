// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "error.h"

namespace jaxcudnn {

/// Element types of x, w and y. A new one needs a row in `kDataTypes` and a case in conv_graph.h.
enum class DataType { kFloat16, kBFloat16, kFloat32, kFloat64 };

struct DataTypeRow {
  DataType type;
  std::string_view name;  ///< as NumPy and ml_dtypes spell it
  int64_t bytes;
};

inline constexpr DataTypeRow kDataTypes[] = {
    {DataType::kFloat16, "float16", 2},
    {DataType::kBFloat16, "bfloat16", 2},
    {DataType::kFloat32, "float32", 4},
    {DataType::kFloat64, "float64", 8},
};

[[nodiscard]] inline const DataTypeRow& RowOf(DataType type) {
  for (const DataTypeRow& row : kDataTypes) {
    if (row.type == type) return row;
  }
  throw Error(ErrorCode::kInternal, "a DataType is missing from kDataTypes");
}

[[nodiscard]] inline std::string_view NameOf(DataType type) { return RowOf(type).name; }

[[nodiscard]] inline DataType DataTypeFromName(std::string_view name) {
  for (const DataTypeRow& row : kDataTypes) {
    if (row.name == name) return row.type;
  }
  throw Error(ErrorCode::kInvalidArgument, "unknown dtype '" + std::string(name) + "'");
}

}  // namespace jaxcudnn
