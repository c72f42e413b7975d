#include "comm/backend_registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep::comm {
namespace {

std::string refusal_of(const std::string& name) {
  try {
    check_backend(name);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(BackendRegistry, AnUnknownNameListsThoseThatWereBuilt) {
  const auto text = refusal_of("smoke-signals");
  EXPECT_NE(text.find("backend \"smoke-signals\" is unknown"),
            std::string::npos)
      << text;
  for (const auto& name : available_backends()) {
    EXPECT_NE(text.find(name), std::string::npos) << text;
  }
}

constexpr std::pair<const char*, const char*> kOptions[] = {
    {"gloo", "-DLOCKSTEP_WITH_GLOO=ON"},
    {"mpi", "-DLOCKSTEP_WITH_MPI=ON"},
};

bool is_built(const std::string& name) {
  const auto built = available_backends();
  return std::find(built.begin(), built.end(), name) != built.end();
}

TEST(BackendRegistry, OneThatWasNotBuiltNamesItsOption) {
  for (const auto& [name, option] : kOptions) {
    const auto text = refusal_of(name);
    if (is_built(name)) {
      EXPECT_EQ(text, "");
    } else {
      EXPECT_NE(text.find(option), std::string::npos) << text;
    }
  }
}

// Rank 0 of this job does not exist: a rank that tried to meet it would wait.
TEST(BackendRegistry, OneThatWasNotBuiltIsRefusedBeforeAnyMeeting) {
  for (const auto& [name, option] : kOptions) {
    if (is_built(name)) continue;
    try {
      init_process_group({.backend = name,
                          .init_method = "tcp://127.0.0.1:1",
                          .timeout = std::chrono::minutes(30),
                          .world_size = 2,
                          .rank = 1});
      FAIL() << name << " was not refused";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(option), std::string::npos)
          << error.what();
    }
  }
}

// A context without liveness is that of ranks on several hosts.
TEST(BackendRegistry, HybridBetweenHostsNamesTheOptionOfGloo) {
  if (is_built("gloo")) return;
  try {
    create_backend("hybrid", {.world_size = 2});
    FAIL() << "hybrid was not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("LOCKSTEP_WITH_GLOO"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace lockstep::comm
