// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "dtypes.h"
#include "epilogue.h"
#include "fields.h"

namespace jaxcudnn {

/// Which of the three arrays of the trilinear form <dy, conv(x, w)> is asked for.
enum class ConvOp { kFprop, kDgrad, kWgrad };

[[nodiscard]] ConvOp ConvOpFromName(std::string_view name);
[[nodiscard]] std::string_view NameOf(ConvOp op);

/// One of the three readings of a *forward* convolution y = conv(x, w). Sizes are those of cuDNN's
/// logical order, N C spatial... and K C/groups window... .
struct ConvSpec {
  ConvOp op;
  std::vector<int64_t> x, w, y;
  std::vector<int64_t> stride, pre_padding, post_padding, dilation;
  bool flip;                    ///< true: the window is reversed, cuDNN's CONVOLUTION
  DataType dtype;               ///< of x, w and y alike; products are summed in float32, or float64
  bool allow_tf32;              ///< float32 operands may be rounded to TF32
  bool channels_first = false;  ///< memory is in the logical order; else N spatial... C
  Epilogue epilogue = {};

  /// Every field, once: equality, hash and text follow from this list.
  [[nodiscard]] auto fields() const {
    return std::make_tuple(Field{"op", op}, Field{"x", x}, Field{"w", w}, Field{"y", y},
                           Field{"stride", stride}, Field{"pre_padding", pre_padding},
                           Field{"post_padding", post_padding}, Field{"dilation", dilation},
                           Field{"flip", flip}, Field{"dtype", dtype},
                           Field{"allow_tf32", allow_tf32}, Field{"channels_first", channels_first},
                           Field{"epilogue", epilogue});
  }

  [[nodiscard]] size_t spatial_rank() const { return stride.size(); }
};

/// How many elements apart neighbours along each dimension of x, w or y lie in memory, without
/// gaps. There are two orders, since a filter has the same one as the images for cuDNN: given the
/// strides of H W I O beside N H W C it reads the bytes as O H W I, at full speed.
[[nodiscard]] std::vector<int64_t> Strides(const ConvSpec& spec, const std::vector<int64_t>& sizes);

/// How many products the convolution sums, or would without padding.
[[nodiscard]] double Products(const ConvSpec& spec);

/// Each output channel has one input channel of its own, as in a depthwise convolution.
[[nodiscard]] bool HasOneChannelAGroup(const ConvSpec& spec);

[[nodiscard]] bool IsDilated(const ConvSpec& spec);

/// Input and output channels in a group, the fewer of both.
[[nodiscard]] int64_t FewestChannels(const ConvSpec& spec);

/// Throws kInvalidArgument if the lists have the wrong lengths or a number is out of range. Python
/// has checked the meaning; this is what keeps a hand-written call from corrupting memory.
void Validate(const ConvSpec& spec);

}  // namespace jaxcudnn
