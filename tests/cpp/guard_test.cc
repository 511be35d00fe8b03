// SPDX-License-Identifier: Apache-2.0
#include "guard.h"

#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "check.h"
#include "error.h"

namespace jaxcudnn {
namespace {

using Caught = std::pair<ErrorCode, std::string>;

template <typename Body>
Caught CaughtFrom(const Body& throws) {
  const auto body = [&]() -> Caught {
    throws();
    return {ErrorCode::kUnsupported, "nothing was thrown"};
  };
  return CatchAll(body, [](ErrorCode code, std::string_view text) -> Caught {
    return {code, std::string(text)};
  });
}

void WhatTheBodyReturnsPassesThrough() {
  const auto failed = [](ErrorCode, std::string_view) { return std::string("failed"); };
  CHECK(CatchAll([] { return std::string("result"); }, failed) == "result");
}

void OurErrorsKeepTheirCode() {
  for (ErrorCode code :
       {ErrorCode::kInvalidArgument, ErrorCode::kUnsupported, ErrorCode::kResourceExhausted,
        ErrorCode::kFailedPrecondition, ErrorCode::kInternal}) {
    CHECK(CaughtFrom([=] { throw Error(code, "why"); }) == Caught(code, "why"));
  }
}

void OtherExceptionsAreInternal() {
  CHECK(CaughtFrom([] { throw std::runtime_error("why"); }) == Caught(ErrorCode::kInternal, "why"));
  CHECK(CaughtFrom([] { throw std::bad_alloc(); }).first == ErrorCode::kInternal);
}

void NothingGetsThrough() {
  const Caught unknown{ErrorCode::kInternal, "an exception of unknown type"};
  CHECK(CaughtFrom([] { throw 42; }) == unknown);
  CHECK(CaughtFrom([] { throw "text"; }) == unknown);
}

}  // namespace
}  // namespace jaxcudnn

int main() {
  using namespace jaxcudnn;
  WhatTheBodyReturnsPassesThrough();
  OurErrorsKeepTheirCode();
  OtherExceptionsAreInternal();
  NothingGetsThrough();
  return testing::failures != 0;
}
