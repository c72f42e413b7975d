// The work of benchmarks/collectives/collectives.cpp with MPI, for one line of
// it, given as arguments: OPERATION BYTES COUNT.

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int kRoot = 0;

class Operation {
 public:
  Operation(std::string name, int elements)
      : name_(std::move(name)), elements_(elements) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &world_);
    share_ = elements / world_;
    in_.resize(static_cast<size_t>(elements));
    out_.resize(static_cast<size_t>(elements));
    for (size_t i = 0; i < in_.size(); ++i) in_[i] = input(rank_, i);
    if (name_ == "all_reduce" || name_ == "broadcast" ||
        (name_ == "reduce" && rank_ == kRoot)) {
      out_ = in_;
    }
  }

  void run() {
    if (name_ == "all_reduce") {
      MPI_Allreduce(MPI_IN_PLACE,
                    out_.data(),
                    elements_,
                    MPI_FLOAT,
                    MPI_SUM,
                    MPI_COMM_WORLD);
    } else if (name_ == "broadcast") {
      MPI_Bcast(out_.data(), elements_, MPI_FLOAT, kRoot, MPI_COMM_WORLD);
    } else if (name_ == "reduce") {
      const bool is_root = rank_ == kRoot;
      MPI_Reduce(is_root ? MPI_IN_PLACE : in_.data(),
                 is_root ? out_.data() : nullptr,
                 elements_,
                 MPI_FLOAT,
                 MPI_SUM,
                 kRoot,
                 MPI_COMM_WORLD);
    } else if (name_ == "all_gather") {
      MPI_Allgather(in_.data(),
                    share_,
                    MPI_FLOAT,
                    out_.data(),
                    share_,
                    MPI_FLOAT,
                    MPI_COMM_WORLD);
    } else if (name_ == "reduce_scatter") {
      MPI_Reduce_scatter_block(
          in_.data(), out_.data(), share_, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (name_ == "all_to_all") {
      MPI_Alltoall(in_.data(),
                   share_,
                   MPI_FLOAT,
                   out_.data(),
                   share_,
                   MPI_FLOAT,
                   MPI_COMM_WORLD);
    } else if (name_ == "gather") {
      MPI_Gather(in_.data(),
                 share_,
                 MPI_FLOAT,
                 out_.data(),
                 share_,
                 MPI_FLOAT,
                 kRoot,
                 MPI_COMM_WORLD);
    } else if (name_ == "scatter") {
      MPI_Scatter(in_.data(),
                  share_,
                  MPI_FLOAT,
                  out_.data(),
                  share_,
                  MPI_FLOAT,
                  kRoot,
                  MPI_COMM_WORLD);
    } else if (name_ == "send_recv") {
      if (rank_ == kRoot) {
        send(in_, 1);
        receive(out_, 1);
      } else {
        receive(out_, kRoot);
        send(out_, kRoot);
      }
    } else {
      std::fprintf(stderr, "unknown operation %s\n", name_.c_str());
      MPI_Abort(MPI_COMM_WORLD, 2);
    }
  }

  void clear() { out_.assign(out_.size(), 0.0F); }

  [[nodiscard]] bool is_right() const {
    const bool at_root_alone = name_ == "reduce" || name_ == "gather";
    if (at_root_alone && rank_ != kRoot) return true;
    const bool is_share = name_ == "reduce_scatter" || name_ == "scatter";
    const int count = is_share ? share_ : elements_;
    for (int i = 0; i < count; ++i) {
      if (out_[static_cast<size_t>(i)] != expected(i)) return false;
    }
    return true;
  }

 private:
  void send(const std::vector<float>& values, int to) const {
    MPI_Send(values.data(), elements_, MPI_FLOAT, to, 0, MPI_COMM_WORLD);
  }
  void receive(std::vector<float>& values, int from) const {
    MPI_Recv(values.data(),
             elements_,
             MPI_FLOAT,
             from,
             0,
             MPI_COMM_WORLD,
             MPI_STATUS_IGNORE);
  }

  /// Rank r's element i.
  static float input(int rank, size_t i) {
    return static_cast<float>(i % 1000) + static_cast<float>(rank);
  }
  [[nodiscard]] float sum(int i) const {
    return static_cast<float>(i % 1000 * world_ + world_ * (world_ - 1) / 2);
  }
  [[nodiscard]] float expected(int i) const {
    const int own = rank_ * share_;
    const auto at = [](int k) { return static_cast<size_t>(k); };
    if (name_ == "all_reduce" || name_ == "reduce") return sum(i);
    if (name_ == "broadcast" || name_ == "send_recv") {
      return input(kRoot, at(i));
    }
    if (name_ == "reduce_scatter") return sum(own + i);
    if (name_ == "scatter") return input(kRoot, at(own + i));
    if (name_ == "all_to_all") return input(i / share_, at(own + i % share_));
    return input(i / share_, at(i % share_));  // all_gather, gather
  }

  std::string name_;
  int elements_;
  int rank_ = 0;
  int world_ = 1;
  int share_ = 0;
  std::vector<float> in_;
  std::vector<float> out_;
};

bool is_right(const std::string& name, int elements) {
  Operation operation(name, elements);
  operation.run();
  return operation.is_right();
}

double seconds_per_operation(const std::string& name, int elements, int count) {
  Operation operation(name, elements);
  operation.clear();
  for (int i = 0; i < 10; ++i) operation.run();
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  for (int i = 0; i < count; ++i) operation.run();
  MPI_Barrier(MPI_COMM_WORLD);
  return (MPI_Wtime() - start) / count;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 4) MPI_Abort(MPI_COMM_WORLD, 2);
  const int elements = std::atoi(argv[2]) / static_cast<int>(sizeof(float));
  const bool correct = is_right(argv[1], elements);
  const double seconds =
      seconds_per_operation(argv[1], elements, std::atoi(argv[3]));
  std::printf("{\"seconds\": %.9g, \"correct\": %s}\n",
              seconds,
              correct ? "true" : "false");
  MPI_Finalize();
}
