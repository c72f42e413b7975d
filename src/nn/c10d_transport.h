#pragma once

#include <memory>
#include <vector>

#include "nn/transport.h"

namespace c10d {
class Work;
}

namespace lockstep::nn {

/// Averages over any c10d backend: gradients are copied into flat buckets, in
/// reverse order of the parameters, and each bucket is reduced as soon as it is
/// full, while backward goes on.
class C10dTransport final : public Transport {
 public:
  C10dTransport(std::shared_ptr<distributed::Group> group,
                const std::vector<NamedTensor>& parameters,
                double bucket_cap_mb);
  ~C10dTransport() override;

  void begin() override;
  void ready(size_t index) override;
  void finish() override;
  [[noreturn]] void fail_unready(const std::vector<size_t>& missing) override;
  void abandon() noexcept override;

 private:
  struct Bucket;

  void launch(Bucket& bucket);
  void wait(Bucket& bucket);
  [[noreturn]] void rethrow_failure() const;

  std::shared_ptr<distributed::Group> group_;
  std::vector<NamedTensor> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;  ///< by parameter
  size_t launched_ = 0;            ///< the first so many buckets are under way
};

}  // namespace lockstep::nn
