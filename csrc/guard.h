// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string_view>

#include "error.h"

namespace jaxcudnn {

/// Gives what `body` returns, or what `failed(ErrorCode, std::string_view)` makes of the exception
/// that it threw. Nothing gets through: an exception of another type than std::exception that left
/// a handler would end the process.
template <typename Body, typename Failed>
auto CatchAll(const Body& body, const Failed& failed) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    return failed(error.code(), error.what());
  } catch (const std::exception& error) {
    return failed(ErrorCode::kInternal, error.what());
  } catch (...) {
    return failed(ErrorCode::kInternal, "an exception of unknown type");
  }
}

}  // namespace jaxcudnn
