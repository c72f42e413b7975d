#include "comm/backend_registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "lockstep/core/error.h"

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

TEST(BackendRegistry, OneThatWasNotBuiltNamesItsOption) {
  const auto built = available_backends();
  for (const auto& [name, option] :
       {std::pair{"gloo", "-DLOCKSTEP_WITH_GLOO=ON"},
        std::pair{"mpi", "-DLOCKSTEP_WITH_MPI=ON"}}) {
    const auto text = refusal_of(name);
    if (std::find(built.begin(), built.end(), name) != built.end()) {
      EXPECT_EQ(text, "");
    } else {
      EXPECT_NE(text.find(option), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace lockstep::comm
