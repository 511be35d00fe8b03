// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "dtypes.h"
#include "fields.h"

namespace jaxcudnn {

/// Which of the three arrays of the trilinear form <dy, conv(x, w)> is asked for.
enum class ConvOp { kFprop, kDgrad, kWgrad };

[[nodiscard]] ConvOp ConvOpFromName(std::string_view name);
[[nodiscard]] std::string_view NameOf(ConvOp op);

/// One of the three readings of a *forward* convolution y = conv(x, w). Sizes are those of cuDNN's
/// logical order, N C spatial... and K C/groups window...; memory is channels last and K window...
/// C.
struct ConvSpec {
  ConvOp op;
  std::vector<int64_t> x, w, y;
  std::vector<int64_t> stride, pre_padding, post_padding, dilation;
  bool flip;        ///< true: the window is reversed, cuDNN's CONVOLUTION
  DataType dtype;   ///< of x, w and y alike; products are summed in float32, or float64
  bool allow_tf32;  ///< float32 operands may be rounded to TF32

  /// Every field, once: equality, hash and text follow from this list.
  [[nodiscard]] auto fields() const {
    return std::make_tuple(Field{"op", op}, Field{"x", x}, Field{"w", w}, Field{"y", y},
                           Field{"stride", stride}, Field{"pre_padding", pre_padding},
                           Field{"post_padding", post_padding}, Field{"dilation", dilation},
                           Field{"flip", flip}, Field{"dtype", dtype},
                           Field{"allow_tf32", allow_tf32});
  }

  [[nodiscard]] size_t spatial_rank() const { return stride.size(); }
};

/// Throws kInvalidArgument if the lists have the wrong lengths or a number is out of range. Python
/// has checked the meaning; this is what keeps a hand-written call from corrupting memory.
void Validate(const ConvSpec& spec);

}  // namespace jaxcudnn
