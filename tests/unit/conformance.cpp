#include "unit/conformance.h"

#include <optional>

#include "comm/backend_registry.h"
#include "comm/liveness/place.h"
#include "core/env.h"
#include "distributed/lifetime.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

/// With "hybrid", which on one host is "shm".
constexpr int kRanksPerHost = 2;

/// While it lives.
struct PretendedHosts {
  PretendedHosts() { comm::liveness::pretend_hosts(kRanksPerHost); }
  ~PretendedHosts() { comm::liveness::pretend_hosts(0); }
  PretendedHosts(const PretendedHosts&) = delete;
  PretendedHosts& operator=(const PretendedHosts&) = delete;
};

/// Of the job that mpirun started, if it did.
std::optional<int64_t> mpi_ranks() {
  return env::get_int("OMPI_COMM_WORLD_SIZE");
}

void run_as_one_rank(const std::function<void(int rank)>& fn,
                     const InitOptions& options) {
  init_process_group(options);
  try {
    fn(get_rank());
  } catch (const std::exception& error) {
    distributed::fail_default_group(error.what());
    destroy_process_group();
    throw;
  }
  destroy_process_group();
}

Tensor whole(int rank, int64_t numel, c10::ScalarType dtype) {
  const auto numbers = (at::arange(numel, at::kLong) * 7 + rank * 3) % 9;
  const bool has_negatives = dtype != at::kByte && dtype != at::kBool;
  return has_negatives ? numbers - 4 : numbers;
}

}  // namespace

Tensor input_of(int rank, int64_t numel, c10::ScalarType dtype) {
  return whole(rank, numel, dtype).to(dtype);
}

Tensor reduced(ReduceOp op, int ranks, int64_t numel, c10::ScalarType dtype) {
  auto result = whole(0, numel, dtype);
  for (int rank = 1; rank < ranks; ++rank) {
    const auto next = whole(rank, numel, dtype);
    switch (op) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
        result = result + next;
        break;
      case ReduceOp::PRODUCT:
        result = result * next;
        break;
      case ReduceOp::MIN:
        result = at::minimum(result, next);
        break;
      case ReduceOp::MAX:
        result = at::maximum(result, next);
        break;
    }
  }
  if (op == ReduceOp::AVG) {
    if (at::isIntegralType(dtype, /*includeBool=*/false)) {
      return at::div(result, ranks, "trunc").to(dtype);
    }
    const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    return (result.to(wide) / ranks).to(dtype);
  }
  return result.to(dtype);
}

bool same(const Tensor& actual, const Tensor& expected) {
  if (actual.scalar_type() == at::kFloat8_e4m3fn) {
    return actual.view(at::kByte).equal(expected.view(at::kByte));
  }
  return actual.equal(expected);
}

std::vector<ConformanceCase> cases(const std::vector<int>& ranks) {
  if (const auto n = mpi_ranks()) return {{"mpi", static_cast<int>(*n)}};
  std::vector<ConformanceCase> result;
  for (const auto& name : comm::available_backends()) {
    if (name == "mpi") continue;
    if (name == "hybrid") {
#ifdef LOCKSTEP_HAS_GLOO
      result.emplace_back(name, 2 * kRanksPerHost);
#endif
      continue;
    }
    for (const int n : ranks) result.emplace_back(name, n);
  }
  return result;
}

int Conformance::ranks_per_host() const {
  return std::get<0>(GetParam()) == "hybrid" ? kRanksPerHost : ranks();
}

int Conformance::ranks_here() const {
  return mpi_ranks() ? 1 : ranks();
}

bool Conformance::is_here(int rank) const {
  return !mpi_ranks() || env::get_int("OMPI_COMM_WORLD_RANK") == rank;
}

void Conformance::run(const std::function<void(int rank)>& fn,
                      std::chrono::milliseconds timeout) const {
  const InitOptions options = {.backend = std::get<0>(GetParam()),
                               .timeout = timeout};
  if (options.backend == "hybrid") {
    const PretendedHosts pretended;
    testing::run_ranks(ranks(), fn, options);
  } else if (mpi_ranks()) {
    run_as_one_rank(fn, options);
  } else {
    testing::run_ranks(ranks(), fn, options);
  }
}

std::string name_of(const ::testing::TestParamInfo<ConformanceCase>& info) {
  return std::get<0>(info.param) + '_' +
         std::to_string(std::get<1>(info.param));
}

}  // namespace lockstep
