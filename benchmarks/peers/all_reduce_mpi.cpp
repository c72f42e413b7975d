// The work of benchmarks/collectives/all_reduce.cpp with MPI_Allreduce, for
// one pair of arguments: BYTES OPERATIONS.

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

void all_reduce(std::vector<float>& values) {
  MPI_Allreduce(MPI_IN_PLACE,
                values.data(),
                static_cast<int>(values.size()),
                MPI_FLOAT,
                MPI_SUM,
                MPI_COMM_WORLD);
}

bool sums_are_right(size_t elements, int rank, int world) {
  std::vector<float> values(elements);
  for (size_t i = 0; i < elements; ++i) {
    values[i] = static_cast<float>(i % 1000) + static_cast<float>(rank);
  }
  all_reduce(values);
  for (size_t i = 0; i < elements; ++i) {
    const auto sum =
        static_cast<int>(i % 1000) * world + world * (world - 1) / 2;
    if (values[i] != static_cast<float>(sum)) return false;
  }
  return true;
}

double seconds_per_operation(size_t elements, int operations) {
  std::vector<float> values(elements);
  for (int i = 0; i < 10; ++i) all_reduce(values);
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  for (int i = 0; i < operations; ++i) all_reduce(values);
  return (MPI_Wtime() - start) / operations;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 3) MPI_Abort(MPI_COMM_WORLD, 2);
  int rank = 0;
  int world = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  const auto elements = std::strtoul(argv[1], nullptr, 10) / sizeof(float);
  const bool correct = sums_are_right(elements, rank, world);
  const double seconds = seconds_per_operation(elements, std::atoi(argv[2]));
  std::printf("{\"seconds\": %.9g, \"correct\": %s}\n",
              seconds,
              correct ? "true" : "false");
  MPI_Finalize();
}
