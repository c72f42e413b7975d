#include "unit/conformance.h"

#include <atomic>
#include <thread>

namespace lockstep {
namespace {

using namespace std::chrono_literals;

TEST_P(Conformance, WrongArgumentsAreRefusedAndTheGroupStaysUsable) {
  const int n = ranks();
  run([&](int rank) {
    Tensor undefined;
    auto good = at::ones({4});
    auto meta = at::ones({4}, at::TensorOptions().device(at::kMeta));
    auto expanded = at::ones({1}).expand({4});
    auto boolean = at::ones({4}, at::kBool);
    auto complex = at::ones({4}, at::kComplexFloat);
    auto sparse = at::ones({4}).to_sparse();
    auto longer = at::ones({4 * n + 1});
    auto other = at::ones({4 * n}, at::kDouble);
    std::vector<Tensor> too_many(n + 1, good);
    std::vector<Tensor> other_shape(n, at::ones({2, 2}));

    expect_error<InvalidArgument>([&] { all_reduce(undefined); }, "undefined");
    expect_error<InvalidArgument>([&] { all_reduce(meta); }, "meta");
    expect_error<InvalidArgument>([&] { all_reduce(expanded); }, "clone()");
    expect_error<InvalidArgument>([&] { all_reduce(sparse); }, "to_dense()");
    expect_error<Unsupported>([&] { all_reduce(boolean); }, "Bool");
    expect_error<Unsupported>([&] { all_reduce(complex); }, "ComplexFloat");
    expect_error<InvalidArgument>([&] { broadcast(good, {.src = n}); }, "src");
    expect_error<InvalidArgument>([&] { broadcast(good, {.src = -1}); }, "src");
    expect_error<InvalidArgument>([&] { all_gather(too_many, good); },
                                  "one per rank");
    expect_error<InvalidArgument>([&] { all_gather(other_shape, good); },
                                  "outputs[0] has shape [2, 2]");
    expect_error<InvalidArgument>([&] { all_gather_into_tensor(longer, good); },
                                  "are needed");
    expect_error<InvalidArgument>([&] { all_gather_into_tensor(other, good); },
                                  "dtype");
    expect_error<InvalidArgument>([&] { reduce_scatter(good, too_many); },
                                  "one per rank");
    expect_error<InvalidArgument>([&] { reduce_scatter_tensor(good, longer); },
                                  "are needed");
    expect_error<InvalidArgument>([&] { reduce(good, {.dst = n}); }, "dst");
    expect_error<Unsupported>([&] { reduce(complex); }, "ComplexFloat");
    expect_error<InvalidArgument>([&] { gather(good, {.dst = -1}); }, "dst");
    expect_error<InvalidArgument>(
        [&] { gather(good, too_many, {.dst = rank}); }, "one per rank");
    expect_error<InvalidArgument>([&] { gather(good, {.dst = rank}); },
                                  "one per rank");
    expect_error<InvalidArgument>(
        [&] { scatter(good, other_shape, {.src = rank}); },
        "scatter_list[0] has shape [2, 2]");
    if (n > 1) {
      expect_error<InvalidArgument>(
          [&] { scatter(good, too_many, {.src = (rank + 1) % n}); },
          "for the root alone");
    }
    expect_error<InvalidArgument>([&] { all_to_all(too_many, too_many); },
                                  "one per rank");
    auto rows = at::ones({4 * n});
    expect_error<InvalidArgument>([&] { all_to_all_single(other, rows); },
                                  "dtype");
    if (n > 1) {
      expect_error<InvalidArgument>([&] { all_to_all_single(longer, rows); },
                                    "do not divide equally");
    }
    const std::vector<int64_t> equal(n, 4);
    auto negative = equal;
    negative[0] = 4 * n + 4;
    negative.back() = n > 1 ? -4 : -1;
    auto output = at::empty({4 * n});
    const auto refuses = [&](std::vector<int64_t> output_splits,
                             std::vector<int64_t> input_splits,
                             const char* part) {
      expect_error<InvalidArgument>(
          [&] {
            all_to_all_single(output,
                              rows,
                              {.output_split_sizes = std::move(output_splits),
                               .input_split_sizes = std::move(input_splits)});
          },
          part);
    };
    refuses({}, std::vector<int64_t>(n + 1, 4), "one for each of");
    refuses(std::vector<int64_t>(n, 5), equal, "add up to");
    refuses(negative, equal, "a negative number");
    refuses(std::vector<int64_t>(n, int64_t{1} << 62), equal, "add up to more");
    expect_error<InvalidArgument>([&] { all_to_all_single(rows, rows); },
                                  "shares memory");
    std::vector<Tensor> one_list(n, good);
    expect_error<InvalidArgument>([&] { all_to_all(one_list, one_list); },
                                  "shares memory");
    auto scalar = at::ones({});
    expect_error<InvalidArgument>(
        [&] { all_to_all_single(scalar, at::ones({})); }, "not a scalar");
    expect_error<Unsupported>(
        [&] { reduce_scatter(boolean, std::vector<Tensor>(n, boolean)); },
        "Bool");

    auto tensor = input_of(rank, 4, at::kFloat);
    all_reduce(tensor);
    EXPECT_SAME(tensor, reduced(ReduceOp::SUM, n, 4, at::kFloat), "afterwards");
  });
}

TEST(ConformanceWithoutGroup, EveryCollectiveSaysWhatToCall) {
  auto tensor = at::ones({2});
  std::vector<Tensor> list = {tensor};
  const std::string part = "call init_process_group first";
  expect_error<InvalidArgument>([&] { all_reduce(tensor); }, part);
  expect_error<InvalidArgument>([&] { broadcast(tensor); }, part);
  expect_error<InvalidArgument>([&] { all_gather(list, tensor); }, part);
  expect_error<InvalidArgument>([&] { all_gather_into_tensor(tensor, tensor); },
                                part);
  expect_error<InvalidArgument>([&] { reduce_scatter(tensor, list); }, part);
  expect_error<InvalidArgument>([&] { reduce_scatter_tensor(tensor, tensor); },
                                part);
  expect_error<InvalidArgument>([&] { reduce(tensor); }, part);
  expect_error<InvalidArgument>([&] { gather(tensor, list); }, part);
  expect_error<InvalidArgument>([&] { gather(tensor); }, part);
  expect_error<InvalidArgument>([&] { scatter(tensor, list); }, part);
  expect_error<InvalidArgument>([&] { scatter(tensor); }, part);
  expect_error<InvalidArgument>([&] { all_to_all(list, list); }, part);
  expect_error<InvalidArgument>([&] { all_to_all_single(tensor, tensor); },
                                part);
  expect_error<InvalidArgument>([&] { barrier(); }, part);
}

/// Ranks that disagree: everyone gets the error.
class ConformanceErrors : public Conformance {
 protected:
  template <class E>
  void expect_on_all(const std::function<void(int rank)>& call) const {
    std::atomic<int> errors{0};
    run([&](int rank) {
      try {
        call(rank);
        ADD_FAILURE() << "no error on rank " << rank;
      } catch (const E&) {
        errors.fetch_add(1);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "another error on rank " << rank << ": " << e.what();
      }
    });
    EXPECT_EQ(errors.load(), ranks_here());
  }
};

INSTANTIATE_TEST_SUITE_P(Backends,
                         ConformanceErrors,
                         ::testing::ValuesIn(cases({2, 3})),
                         name_of);

TEST_P(ConformanceErrors, DifferentShapes) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({rank == 1 ? 5 : 4});
    all_reduce(tensor);
  });
}

TEST_P(ConformanceErrors, DifferentDtypes) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4}, rank == 1 ? at::kInt : at::kFloat);
    all_reduce(tensor);
  });
}

TEST_P(ConformanceErrors, DifferentReductions) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4});
    all_reduce(tensor, {.op = rank == 1 ? ReduceOp::MAX : ReduceOp::SUM});
  });
}

TEST_P(ConformanceErrors, DifferentOperations) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4});
    if (rank == 1) {
      broadcast(tensor);
    } else {
      all_reduce(tensor);
    }
  });
}

TEST_P(ConformanceErrors, DifferentRoots) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4});
    broadcast(tensor, {.src = rank == 1 ? 1 : 0});
  });
}

TEST_P(ConformanceErrors, DifferentDestinations) {
  expect_on_all<MismatchError>([](int rank) {
    auto tensor = at::ones({4});
    reduce(tensor, {.dst = rank == 1 ? 1 : 0});
  });
}

TEST_P(ConformanceErrors, DifferentSources) {
  expect_on_all<MismatchError>([&](int rank) {
    auto tensor = at::ones({4});
    const int src = rank == 1 ? 1 : 0;
    scatter(tensor,
            rank == src ? std::vector<Tensor>(ranks(), at::ones({4}))
                        : std::vector<Tensor>(),
            {.src = src});
  });
}

TEST_P(ConformanceErrors, DifferentShapesOfAGather) {
  expect_on_all<MismatchError>([&](int rank) {
    const auto tensor = at::ones({rank == 1 ? 5 : 4});
    std::vector<Tensor> list;
    for (int r = 0; rank == 0 && r < ranks(); ++r) {
      list.push_back(at::ones({4}));
    }
    gather(tensor, list);
  });
}

TEST_P(ConformanceErrors, DifferentSplits) {
  expect_on_all<MismatchError>([&](int rank) {
    // Rank 1 sends rank 0 a row that it does not expect.
    std::vector<Tensor> inputs(ranks(), at::ones({2, 3}));
    std::vector<Tensor> outputs;
    for (int r = 0; r < ranks(); ++r) outputs.push_back(at::ones({2, 3}));
    if (rank == 1) inputs[0] = at::ones({3, 3});
    try {
      all_to_all(outputs, inputs);
    } catch (const MismatchError& e) {
      EXPECT_NE(std::string(e.what()).find("rank 1 sends 9 elements to rank 0, "
                                           "which expects 6"),
                std::string::npos)
          << e.what();
      throw;
    }
  });
}

TEST_P(ConformanceErrors, AfterAMismatchTheGroupRefuses) {
  expect_on_all<Error>([](int rank) {
    auto tensor = at::ones({rank == 1 ? 5 : 4});
    try {
      all_reduce(tensor);
    } catch (const MismatchError&) {
      barrier();
    }
  });
}

TEST_P(ConformanceErrors, ALateRankIsNamedAtTheDeadline) {
  // Joining has the same bound, so it is not a short one.
  constexpr auto kTimeout = 2s;
  run(
      [&](int rank) {
        if (rank == 1) {
          std::this_thread::sleep_for(2 * kTimeout);
          return;
        }
        const auto start = Clock::now();
        auto tensor = at::ones({4});
        try {
          all_reduce(tensor);
          ADD_FAILURE() << "no error";
        } catch (const TimeoutError& e) {
          EXPECT_EQ(e.context().operation, "all_reduce");
          EXPECT_EQ(e.context().peers, std::vector<int>{1}) << e.what();
        }
        EXPECT_LE(Clock::now() - start, kTimeout + 1s);
      },
      kTimeout);
}

TEST_P(ConformanceErrors, AFailedRankIsNamedByTheOthers) {
  std::atomic<int> lost{0};
  try {
    run([&](int rank) {
      if (rank == 1) {
        barrier();  // all have joined
        throw std::runtime_error("no more coffee");
      }
      auto tensor = at::ones({4});
      try {
        barrier();
        for (;;) all_reduce(tensor);
      } catch (const PeerLost& e) {
        EXPECT_EQ(e.context().peers, std::vector<int>{1}) << e.what();
        EXPECT_NE(std::string(e.what()).find("no more coffee"),
                  std::string::npos)
            << e.what();
        lost.fetch_add(1);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "another error: " << e.what();
      }
    });
    EXPECT_FALSE(is_here(1)) << "the error was swallowed";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "no more coffee");
  }
  EXPECT_EQ(lost.load(), ranks_here() - (is_here(1) ? 1 : 0));
}

TEST_P(ConformanceErrors, ARankThatLeftIsNamedByTheOthers) {
  run([&](int rank) {
    try {
      barrier();  // all have joined
      if (rank == 1) return;
      barrier();
      ADD_FAILURE() << "no error";
    } catch (const PeerLost& e) {
      EXPECT_EQ(e.context().peers, std::vector<int>{1}) << e.what();
    } catch (const std::exception& e) {
      ADD_FAILURE() << "another error: " << e.what();
    }
  });
}

}  // namespace
}  // namespace lockstep
