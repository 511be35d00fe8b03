// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace jaxcudnn {

/// From now on notices forks of this process. CUDA does not survive one: in the child its calls
/// fail or hang, cuDNN's end the process, and locks may be held by threads that are not there.
void WatchForks();

/// Throws kFailedPrecondition in a process that was forked from one in which CUDA had started.
void CheckNotForked();

}  // namespace jaxcudnn
