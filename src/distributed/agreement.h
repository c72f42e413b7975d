#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "core/clock.h"
#include "distributed/group.h"

namespace lockstep::distributed {

/// Compares over the store what ranks are about to do together. In an interop
/// group, whose Python ranks know nothing of it, and alone it does nothing.
class Agreement {
 public:
  /// Tells the others what this rank is about to do. `ranks` are the global
  /// ranks that must agree, this one among them; `store` is for this once.
  Agreement(const Group& whole,
            std::vector<int> ranks,
            c10::intrusive_ptr<c10d::Store> store,
            const std::string& own);

  /// Returns when all have told the same.
  /// \throws MismatchError  on all ranks, with what the first one tells and
  ///     what the first that differs from it does
  /// \throws TimeoutError, PeerLost, StoreError
  void reach(const Deadline& deadline, ErrorContext context) const;

 private:
  std::shared_ptr<comm::Liveness> liveness_;
  std::vector<int> ranks_;  ///< empty: there is nothing to compare
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace lockstep::distributed
