// Layouts of meshes against PyTorch's own.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/distributed/device_mesh.h"
#include "lockstep/testing/run_ranks.h"
#include "support/python.h"

namespace lockstep {
namespace {

using nlohmann::json;

json to_json(const at::Tensor& tensor) {
  if (tensor.dim() == 0) return tensor.item<int>();
  json list = json::array();
  for (int64_t i = 0; i < tensor.size(0); ++i)
    list.push_back(to_json(tensor[i]));
  return list;
}

json seen(const DeviceMesh& mesh) {
  json local_ranks = json::array();
  json groups = json::array();
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    local_ranks.push_back(mesh.get_local_rank(dim));
    groups.push_back(mesh.get_group(dim).ranks());
  }
  return {{"mesh", to_json(mesh.mesh())},
          {"shape", mesh.shape()},
          {"coordinate", mesh.get_coordinate().value()},
          {"local_ranks", local_ranks},
          {"groups", groups}};
}

std::string joined(const std::vector<std::string>& names, char between) {
  std::string text;
  for (const auto& name : names) {
    if (!text.empty()) text += between;
    text += name;
  }
  return text;
}

/// In the order of device_mesh_layouts.py.
json slices(const DeviceMesh& mesh) {
  const auto& names = mesh.mesh_dim_names();
  json result = json::object();
  for (size_t chosen = 1; chosen < size_t{1} << names.size(); ++chosen) {
    std::vector<std::string> part;
    for (size_t i = 0; i < names.size(); ++i) {
      if ((chosen >> i & 1) != 0) part.push_back(names[i]);
    }
    const auto sub = mesh.slice(part);
    result[joined(part, '/')] = seen(sub);
    if (part.size() > 1) {
      result["flat/" + joined(part, '/')] =
          seen(sub.flatten(joined(part, '_')));
    }
  }
  return result;
}

TEST(DeviceMeshInterop, LayoutsArePythons) {
  constexpr int kRanks = 8;
  const auto cases = json::parse(test::run_python("device_mesh_layouts.py"));
  ASSERT_EQ(cases.size(), 7U * kRanks);
  const std::vector<std::string> names = {"dp", "cp", "tp"};
  for (size_t i = 0; i < cases.size() / kRanks; ++i) {
    const auto shape = cases[i]["shape"].get<std::vector<int64_t>>();
    SCOPED_TRACE(cases[i]["shape"]);
    std::vector<json> own(kRanks);
    testing::run_ranks(kRanks, [&](int rank) {
      const auto mesh = init_device_mesh(
          "cpu",
          shape,
          {.mesh_dim_names = {
               names.begin(),
               names.begin() + static_cast<int64_t>(shape.size())}});
      own[static_cast<size_t>(rank)] = slices(mesh);
    });
    for (const auto& expected : cases) {
      if (expected["shape"] != cases[i]["shape"]) continue;
      EXPECT_EQ(own[expected["rank"].get<size_t>()], expected["seen"])
          << "rank " << expected["rank"];
    }
  }
}

}  // namespace
}  // namespace lockstep
