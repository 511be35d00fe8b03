// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "error.h"

namespace jaxcudnn {

/// Element types of x, w and y. A new one needs a row in `kDataTypes` and a case in planner.cc.
enum class DataType {
  kFloat8E4M3,
  kFloat8E5M2,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kInt8,
  kInt32,
};

struct DataTypeRow {
  DataType type;
  std::string_view name;  ///< as NumPy and ml_dtypes spell it
  int64_t bytes;
};

inline constexpr DataTypeRow kDataTypes[] = {
    {DataType::kFloat8E4M3, "float8_e4m3fn", 1},
    {DataType::kFloat8E5M2, "float8_e5m2", 1},
    {DataType::kFloat16, "float16", 2},
    {DataType::kBFloat16, "bfloat16", 2},
    {DataType::kFloat32, "float32", 4},
    {DataType::kFloat64, "float64", 8},
    {DataType::kInt8, "int8", 1},
    {DataType::kInt32, "int32", 4},
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
