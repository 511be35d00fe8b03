// SPDX-License-Identifier: Apache-2.0
//
// The boundary to XLA: the three stages of the custom call, the decoding of its attributes, and the
// one place where exceptions end. What each stage may do:
//   Instantiate  parses; runs on hosts without a GPU and touches no CUDA.
//   Initialize   precedes every Execute of a run, on the run's own thread; may build, measure and
//   allocate. Execute      enqueues, possibly while the stream is captured into a command buffer.
#include "ffi_handlers.h"

#include <driver_types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "attributes.h"
#include "call_site.h"
#include "error.h"
#include "fork_guard.h"
#include "guard.h"
#include "libraries.h"
#include "stage_clock.h"
#include "xla/ffi/api/api.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcudnn {
namespace {

namespace ffi = xla::ffi;

struct ConvState {
  static ffi::TypeId id;
  LateCallSite site;
};

ffi::TypeId ConvState::id = {};

ffi::ErrorCode ToFfi(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return ffi::ErrorCode::kInvalidArgument;
    case ErrorCode::kUnsupported:
      return ffi::ErrorCode::kUnimplemented;
    case ErrorCode::kResourceExhausted:
      return ffi::ErrorCode::kResourceExhausted;
    case ErrorCode::kFailedPrecondition:
      return ffi::ErrorCode::kFailedPrecondition;
    case ErrorCode::kInternal:
      return ffi::ErrorCode::kInternal;
  }
  return ffi::ErrorCode::kUnknown;
}

/// Runs `body`, turning whatever it throws into an FFI error that names the stage.
template <typename Result, typename Body>
Result Guarded(const char* stage, const Body& body) {
  return CatchAll(body, [stage](ErrorCode code, std::string_view text) -> Result {
    ffi::Error error(ToFfi(code), "jaxcudnn (" + std::string(stage) + "): " + std::string(text));
    if constexpr (std::is_same_v<Result, ffi::Error>) {
      return error;
    } else {
      return ffi::Unexpected(std::move(error));
    }
  });
}

/// The attributes of the custom call, as `ReadProblem` asks for them.
class Attributes {
 public:
  explicit Attributes(const ffi::Dictionary& attributes) : attributes_(attributes) {}

  [[nodiscard]] std::string Text(std::string_view name) const {
    return std::string(Get<std::string_view>(name));
  }
  [[nodiscard]] std::string Text(std::string_view name, std::string_view otherwise) const {
    return attributes_.contains(name) ? Text(name) : std::string(otherwise);
  }
  [[nodiscard]] std::vector<int64_t> Sizes(std::string_view name) const {
    const auto span = Get<ffi::Span<const int64_t>>(name);
    return {span.begin(), span.end()};
  }
  [[nodiscard]] bool Flag(std::string_view name) const { return Get<bool>(name); }
  [[nodiscard]] bool Flag(std::string_view name, bool otherwise) const {
    return attributes_.contains(name) ? Flag(name) : otherwise;
  }
  [[nodiscard]] int64_t Number(std::string_view name) const { return Get<int64_t>(name); }
  [[nodiscard]] int64_t Number(std::string_view name, int64_t otherwise) const {
    return attributes_.contains(name) ? Number(name) : otherwise;
  }

 private:
  template <typename T>
  [[nodiscard]] T Get(std::string_view name) const {
    ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_error()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "attribute '" + std::string(name) +
                      "' is missing or of the wrong type: " + value.error().message());
    }
    return *value;
  }

  const ffi::Dictionary& attributes_;
};

using StatePointer = std::unique_ptr<ConvState>;

ffi::ErrorOr<StatePointer> Instantiate(ffi::Dictionary dictionary) {
  return Guarded<ffi::ErrorOr<StatePointer>>("instantiate", [&]() -> ffi::ErrorOr<StatePointer> {
    const Attributes attributes(dictionary);
    CheckSchema(attributes.Number("schema", 1));  // first: the rest may be what is not known
    return StatePointer(new ConvState{LateCallSite(ReadProblem(attributes))});
  });
}

int64_t SizeOf(ffi::AnyBuffer buffer) { return static_cast<int64_t>(buffer.size_bytes()); }

/// Residual and bias, of which the epilogue has none, one or both, in this order.
class Addends {
 public:
  Addends(ffi::RemainingArgs arguments, const Epilogue& epilogue) {
    const size_t expected = static_cast<size_t>(epilogue.residual) + epilogue.bias;
    if (arguments.size() != expected) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the call must have " + std::to_string(2 + expected) + " operands, got " +
                      std::to_string(2 + arguments.size()));
    }
    if (epilogue.residual) residual_ = *arguments.get<ffi::AnyBuffer>(0);
    if (epilogue.bias) bias_ = *arguments.get<ffi::AnyBuffer>(expected - 1);
  }

  [[nodiscard]] Buffers WithPointers(ffi::AnyBuffer a, ffi::AnyBuffer b,
                                     ffi::Result<ffi::AnyBuffer> out) const {
    const auto pointer = [](const auto& buffer) {
      return buffer ? buffer->untyped_data() : nullptr;
    };
    return {a.untyped_data(), b.untyped_data(), out->untyped_data(), pointer(residual_),
            pointer(bias_)};
  }

  [[nodiscard]] BufferSizes WithSizes(ffi::AnyBuffer a, ffi::AnyBuffer b,
                                      ffi::Result<ffi::AnyBuffer> out) const {
    const auto size = [](const auto& buffer) { return buffer ? SizeOf(*buffer) : 0; };
    return {SizeOf(a), SizeOf(b), SizeOf(*out), size(residual_), size(bias_)};
  }

 private:
  std::optional<ffi::AnyBuffer> residual_, bias_;
};

Workspace WorkspaceOf(ffi::Result<ffi::AnyBuffer> buffer) {
  return {buffer->untyped_data(), SizeOf(*buffer)};
}

ffi::Error Initialize(cudaStream_t stream, ffi::ScratchAllocator scratch, int32_t device,
                      ConvState* state, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace) {
  SectionTimer timer(StageClock::kInitialize);
  return Guarded<ffi::Error>("initialize", [&] {
    CheckNotForked();
    const DeviceScope scope(device);
    CallSite& site = state->site.ForElements(static_cast<int64_t>(a.element_count()));
    const Addends addends(rest, site.epilogue());
    site.CheckSizes(addends.WithSizes(a, b, out));
    const auto allocate = [&scratch](size_t bytes) {
      return scratch.Allocate(bytes).value_or(nullptr);
    };
    site.Prepare({device, stream, allocate}, addends.WithPointers(a, b, out),
                 WorkspaceOf(workspace));
    return ffi::Error::Success();
  });
}

ffi::Error Execute(cudaStream_t stream, int32_t device, ConvState* state, ffi::AnyBuffer a,
                   ffi::AnyBuffer b, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::AnyBuffer> workspace) {
  return Guarded<ffi::Error>("execute", [&] {
    const DeviceScope scope(device);
    const CallSite& site = state->site.known();
    const Addends addends(rest, site.epilogue());
    site.Execute(device, stream, addends.WithPointers(a, b, out), WorkspaceOf(workspace));
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER(InstantiateHandler, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(InitializeHandler, Initialize,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::ScratchAllocator>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::State<ConvState>>()
                           .Arg<ffi::AnyBuffer>()    // first operand
                           .Arg<ffi::AnyBuffer>()    // second operand
                           .RemainingArgs()          // residual, bias
                           .Ret<ffi::AnyBuffer>()    // result
                           .Ret<ffi::AnyBuffer>());  // workspace

XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute,
                       ffi::Ffi::BindExecute()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::State<ConvState>>()
                           .Arg<ffi::AnyBuffer>()   // first operand
                           .Arg<ffi::AnyBuffer>()   // second operand
                           .RemainingArgs()         // residual, bias
                           .Ret<ffi::AnyBuffer>()   // result
                           .Ret<ffi::AnyBuffer>(),  // workspace
                       {ffi::Traits::kCmdBufferCompatible});

/// Execute as XLA calls it, with the decoding of the call frame inside the measured time.
XLA_FFI_Error* TimedExecute(XLA_FFI_CallFrame* frame) {
  SectionTimer timer(StageClock::kExecute);
  return ExecuteHandler(frame);
}

const ffi::TypeInfo* StateTypeInfo() {
  static const ffi::TypeInfo info = ffi::MakeTypeInfo<ConvState>();
  return &info;
}

}  // namespace

FfiRegistration ConvRegistration() {
  return {reinterpret_cast<void*>(InstantiateHandler),
          reinterpret_cast<void*>(InitializeHandler),
          reinterpret_cast<void*>(&TimedExecute),
          &ConvState::id,
          const_cast<ffi::TypeInfo*>(StateTypeInfo()),
          XLA_FFI_API_MAJOR,
          XLA_FFI_API_MINOR};
}

}  // namespace jaxcudnn
