#pragma once

#include <condition_variable>
#include <mutex>

#include "comm/p2p/exchange.h"
#include "comm/p2p/transfer.h"

namespace lockstep::comm::p2p {

/// The messages of a world of one, from the rank to itself. A transfer whose
/// time is over ends when somebody waits for it.
class SelfMessenger final : public Messenger {
 public:
  /// `global_rank`: how errors name the rank.
  explicit SelfMessenger(GlobalRank global_rank);

  void start(const TransferPtr& transfer) override;
  void run(const TransferPtr& transfer) override;
  void wait(const Transfer& transfer, std::chrono::milliseconds limit) override;

  /// Ends everything with BackendError: nobody is left who could take part.
  void finish();

 private:
  const GlobalRank global_rank_;
  std::mutex mutex_;  ///< all below
  std::condition_variable ended_;
  Exchange exchange_;
};

}  // namespace lockstep::comm::p2p
