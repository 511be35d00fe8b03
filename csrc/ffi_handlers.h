// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace jaxcudnn {

/// The addresses that XLA needs of the custom call `jaxcudnn_conv_v1`, as untyped pointers so that
/// only ffi_handlers.cc includes XLA's headers.
struct FfiRegistration {
  void* instantiate;
  void* initialize;
  void* execute;
  void* state_type_id;
  void* state_type_info;
  int api_major;  ///< of the headers that the handlers were compiled against
  int api_minor;
};

FfiRegistration ConvRegistration();

}  // namespace jaxcudnn
