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
///
/// A pass that ends early still sends its buckets, so that the ranks stay in
/// step. Marks at the end of each bucket say so: one for each rank, and one for
/// each parameter that got no gradient. The sum of a mark is 0 where all is
/// well.
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

  void fill(Bucket& bucket);
  void launch(Bucket& bucket);
  void wait(Bucket& bucket);
  [[noreturn]] void fail_given_up();
  [[noreturn]] void rethrow_failure();

  const bool backend_averages_;
  std::vector<NamedTensor> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;  ///< by parameter
  size_t launched_ = 0;            ///< the first so many buckets are under way
  bool open_ = false;              ///< between `begin` and the end of the round
  bool gave_up_late_ = false;      ///< the last round, with all buckets sent
  double mark_ = 0;                ///< this rank's, in this round
  std::vector<size_t> missing_;    ///< parameters without a gradient
};

}  // namespace lockstep::nn
