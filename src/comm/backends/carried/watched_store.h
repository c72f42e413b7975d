#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/liveness.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::carried {

/// A PrefixStore whose waits for other ranks' keys end when one of them died.
/// Their errors are PeerLost and TimeoutError with the given context.
class WatchedStore final : public c10d::PrefixStore {
 public:
  WatchedStore(std::string prefix,
               c10::intrusive_ptr<c10d::Store> store,
               std::shared_ptr<Liveness> liveness,
               std::chrono::milliseconds timeout,
               ErrorContext context);

  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(
      const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  std::shared_ptr<Liveness> liveness_;
  std::chrono::milliseconds timeout_;
  ErrorContext context_;
  std::vector<int> peers_;
};

}  // namespace lockstep::comm::carried
