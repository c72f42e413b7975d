#include "lockstep/distributed/device_mesh.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "distributed/group.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/new_group.h"

namespace lockstep {

/// What a mesh and all its slices share.
struct DeviceMesh::Root {
  std::string device_type;
  at::Tensor ranks;  ///< int32, contiguous
  std::vector<std::string> names;
  struct Flattened {
    Axis axis;
    ProcessGroup group;
  };
  std::map<std::string, Flattened> flattened;
  /// Where this rank is; empty: nowhere.
  std::vector<int64_t> coordinate;
};

namespace {

constexpr const char* kOperation = "DeviceMesh";

[[noreturn]] void fail(const std::string& message) {
  throw InvalidArgument(message, {.operation = kOperation});
}

std::string list_of(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) {
    text += (text.empty() ? "\"" : ", \"") + name + '"';
  }
  return text;
}

void check_device_type(const std::string& type) {
  const auto is_letter = [](char c) { return c >= 'a' && c <= 'z'; };
  if (!type.empty() && std::all_of(type.begin(), type.end(), is_letter)) return;
  fail("device type \"" + type +
       "\" must be one like \"cpu\", without an index");
}

void check_names(const std::vector<std::string>& names, int64_t ndim) {
  if (names.empty()) return;
  if (static_cast<int64_t>(names.size()) != ndim) {
    fail("mesh_dim_names holds " + std::to_string(names.size()) +
         " names; one per dimension is needed, " + std::to_string(ndim));
  }
  if (std::set(names.begin(), names.end()).size() != names.size()) {
    fail("a name is there twice in mesh_dim_names: " + list_of(names));
  }
}

at::Tensor checked_ranks(const at::Tensor& mesh) {
  if (!mesh.defined() || !at::isIntegralType(mesh.scalar_type(), false) ||
      mesh.dim() == 0 || mesh.numel() == 0) {
    fail(
        "the mesh must be an integer tensor of at least one rank and one "
        "dimension");
  }
  const auto ranks = mesh.detach().to(at::kCPU, at::kInt).contiguous().clone();
  const int world_size = get_world_size();
  if (ranks.numel() > world_size) {
    fail("the mesh holds " + std::to_string(ranks.numel()) +
         " ranks; there are " + std::to_string(world_size));
  }
  std::set<int> seen;
  for (int64_t i = 0; i < ranks.numel(); ++i) {
    const int rank = ranks.const_data_ptr<int>()[i];
    if (rank < 0 || rank >= world_size || !seen.insert(rank).second) {
      fail("rank " + std::to_string(rank) +
           " of the mesh is there twice or out of range; ranks are 0 to " +
           std::to_string(world_size - 1));
    }
  }
  return ranks;
}

/// Position of a rank in the mesh; empty where it is not in there.
std::vector<int64_t> position(const at::Tensor& ranks, int rank) {
  const auto found = ranks.eq(rank).nonzero();
  if (found.size(0) == 0) return {};
  const auto first = found[0].contiguous();
  const auto* begin = first.const_data_ptr<int64_t>();
  return {begin, begin + ranks.dim()};
}

/// The ranks with the `axes` as the last dimensions, in their order; the other
/// dimensions before are one.
at::Tensor with_last(const at::Tensor& ranks, const std::vector<size_t>& axes) {
  std::vector<int64_t> order;
  std::vector<int64_t> sizes = {-1};
  for (int64_t dim = 0; dim < ranks.dim(); ++dim) {
    if (std::find(axes.begin(), axes.end(), static_cast<size_t>(dim)) ==
        axes.end()) {
      order.push_back(dim);
    }
  }
  for (const size_t axis : axes) {
    order.push_back(static_cast<int64_t>(axis));
    sizes.push_back(ranks.size(static_cast<int64_t>(axis)));
  }
  return ranks.permute(order).reshape(sizes);
}

std::vector<int> to_vector(const at::Tensor& ranks) {
  const auto flat = ranks.contiguous();
  const auto* begin = flat.const_data_ptr<int>();
  return {begin, begin + flat.numel()};
}

/// The own group along the axis.
ProcessGroup make_groups(const at::Tensor& ranks,
                         const std::vector<size_t>& axis,
                         const std::string& name) {
  const auto rows = with_last(ranks, axis).flatten(1);
  if (rows.size(1) == get_world_size()) {
    return ProcessGroup(distributed::require_default_group(kOperation));
  }
  std::vector<std::vector<int>> lists;
  for (int64_t i = 0; i < rows.size(0); ++i) {
    lists.push_back(to_vector(rows[i]));
  }
  return new_subgroups_by_enumeration(lists, {.group_desc = "mesh_" + name})
      .current;
}

}  // namespace

DeviceMesh::DeviceMesh(std::shared_ptr<Root> root,
                       std::vector<std::string> names,
                       std::vector<Axis> axes)
    : root_(std::move(root)), names_(std::move(names)), axes_(std::move(axes)) {
}

DeviceMesh::DeviceMesh(const std::string& device_type,
                       const at::Tensor& mesh,
                       const DeviceMeshOptions& options)
    : DeviceMesh(without_groups(device_type, mesh, options)) {
  for (size_t dim = 0; dim < axes_.size(); ++dim) {
    groups_.push_back(make_groups(
        root_->ranks,
        axes_[dim],
        names_.empty() ? "dim_" + std::to_string(dim) : names_[dim]));
  }
}

DeviceMesh DeviceMesh::without_groups(const std::string& device_type,
                                      const at::Tensor& mesh,
                                      const DeviceMeshOptions& options) {
  check_device_type(device_type);
  if (!is_initialized()) init_process_group();
  auto root = std::make_shared<Root>();
  root->device_type = device_type;
  root->ranks = checked_ranks(mesh);
  check_names(options.mesh_dim_names, root->ranks.dim());
  root->names = options.mesh_dim_names;
  root->coordinate = position(root->ranks, lockstep::get_rank());
  std::vector<Axis> axes;
  for (int64_t dim = 0; dim < root->ranks.dim(); ++dim) {
    axes.push_back({static_cast<size_t>(dim)});
  }
  return {std::move(root), options.mesh_dim_names, std::move(axes)};
}

DeviceMesh DeviceMesh::from_group(const ProcessGroup& group,
                                  const std::string& device_type,
                                  const DeviceMeshOptions& options) {
  auto mesh =
      without_groups(device_type, at::tensor(group.ranks(), at::kInt), options);
  mesh.groups_ = {group};
  return mesh;
}

DeviceMesh DeviceMesh::from_group(const std::vector<ProcessGroup>& groups,
                                  const std::string& device_type,
                                  const at::Tensor& mesh,
                                  const DeviceMeshOptions& options) {
  auto result = without_groups(device_type, mesh, options);
  if (groups.size() != result.axes_.size()) {
    fail(std::to_string(groups.size()) + " groups are given for a mesh of " +
         std::to_string(result.axes_.size()) +
         " dimensions; one per "
         "dimension is needed");
  }
  if (options.mesh_dim_names.empty()) {
    fail("mesh_dim_names must be given with several groups");
  }
  result.groups_ = groups;
  return result;
}

DeviceMesh DeviceMesh::operator[](const std::string& name) const {
  return slice({name});
}

DeviceMesh DeviceMesh::operator[](
    std::initializer_list<std::string> names) const {
  return slice(names);
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  if (names_.empty()) fail("a mesh without mesh_dim_names cannot be sliced");
  if (names == names_) return *this;
  DeviceMesh part(root_, names, {});
  Axis all;
  const bool is_whole = names_ == root_->names;
  for (const auto& name : names) {
    const auto own = std::find(names_.begin(), names_.end(), name);
    const auto flat = root_->flattened.find(name);
    if (own != names_.end()) {
      const auto dim = static_cast<size_t>(own - names_.begin());
      part.axes_.push_back(axes_[dim]);
      part.groups_.push_back(groups_[dim]);
    } else if (is_whole && flat != root_->flattened.end()) {
      part.axes_.push_back(flat->second.axis);
      part.groups_.push_back(flat->second.group);
    } else {
      fail("there is no dimension \"" + name + "\"; there are " +
           list_of(names_));
    }
    all.insert(all.end(), part.axes_.back().begin(), part.axes_.back().end());
  }
  if (std::adjacent_find(all.begin(), all.end(), std::greater_equal<>()) !=
      all.end()) {
    fail("the dimensions " + list_of(names) +
         " overlap or are out of order; give them in the order of the mesh");
  }
  if (names.empty()) fail("no dimension is given");
  return part;
}

DeviceMesh DeviceMesh::flatten(const std::string& mesh_dim_name) const {
  if (names_.empty()) fail("a mesh without mesh_dim_names cannot be flattened");
  std::string name = mesh_dim_name;
  if (name.empty()) {
    for (const auto& own : names_) name += (name.empty() ? "" : "_") + own;
  }
  if (axes_.size() == 1 && name == names_[0]) return *this;
  Axis axis;
  for (const auto& own : axes_) axis.insert(axis.end(), own.begin(), own.end());
  const auto& taken = root_->names;
  auto found = root_->flattened.find(name);
  if (std::find(taken.begin(), taken.end(), name) != taken.end() ||
      (found != root_->flattened.end() && found->second.axis != axis)) {
    fail("the mesh has a dimension \"" + name +
         "\" already; give the flattened one another name");
  }
  if (found == root_->flattened.end()) {
    auto group = make_groups(root_->ranks, axis, name);
    found = root_->flattened.emplace(name, Root::Flattened{axis, group}).first;
  }
  DeviceMesh flat(root_, {name}, {axis});
  flat.groups_ = {found->second.group};
  return flat;
}

size_t DeviceMesh::index_of(const std::optional<MeshDim>& mesh_dim) const {
  if (!mesh_dim) {
    if (axes_.size() == 1) return 0;
    fail("mesh_dim is needed, since the mesh has " +
         std::to_string(axes_.size()) + " dimensions");
  }
  if (const auto* index = std::get_if<int>(&mesh_dim->held())) {
    const auto dims = static_cast<int>(axes_.size());
    if (*index < -dims || *index >= dims) {
      fail("there is no dimension " + std::to_string(*index) + "; there are " +
           std::to_string(dims));
    }
    return static_cast<size_t>(*index < 0 ? *index + dims : *index);
  }
  const auto& name = std::get<std::string>(mesh_dim->held());
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) {
    fail("there is no dimension \"" + name + "\"; there are " +
         (names_.empty() ? "no names" : list_of(names_)));
  }
  return static_cast<size_t>(found - names_.begin());
}

ProcessGroup DeviceMesh::get_group(
    const std::optional<MeshDim>& mesh_dim) const {
  if (mesh_dim) {
    const auto* name = std::get_if<std::string>(&mesh_dim->held());
    const auto flat =
        name ? root_->flattened.find(*name) : root_->flattened.end();
    if (flat != root_->flattened.end()) return flat->second.group;
  }
  return groups_[index_of(mesh_dim)];
}

std::vector<ProcessGroup> DeviceMesh::get_all_groups() const {
  return groups_;
}

int DeviceMesh::get_local_rank(const std::optional<MeshDim>& mesh_dim) const {
  return get_group(mesh_dim).rank();
}

int DeviceMesh::get_rank() const {
  return lockstep::get_rank();
}

std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const {
  if (root_->coordinate.empty()) return std::nullopt;
  std::vector<int64_t> result;
  for (const auto& axis : axes_) {
    int64_t index = 0;
    for (const size_t dim : axis) {
      index = index * root_->ranks.size(static_cast<int64_t>(dim)) +
              root_->coordinate[dim];
    }
    result.push_back(index);
  }
  return result;
}

int64_t DeviceMesh::size(const std::optional<MeshDim>& mesh_dim) const {
  const auto sizes = shape();
  if (mesh_dim) return sizes[index_of(mesh_dim)];
  return std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

int64_t DeviceMesh::ndim() const {
  return static_cast<int64_t>(axes_.size());
}

std::vector<int64_t> DeviceMesh::shape() const {
  std::vector<int64_t> sizes;
  for (const auto& axis : axes_) {
    int64_t size = 1;
    for (const size_t dim : axis) {
      size *= root_->ranks.size(static_cast<int64_t>(dim));
    }
    sizes.push_back(size);
  }
  return sizes;
}

const std::string& DeviceMesh::device_type() const {
  return root_->device_type;
}

at::Tensor DeviceMesh::mesh() const {
  Axis all;
  for (const auto& axis : axes_)
    all.insert(all.end(), axis.begin(), axis.end());
  const auto parts = with_last(root_->ranks, all).flatten(1);
  for (int64_t i = 0; i < parts.size(0); ++i) {
    const bool own = parts[i].eq(get_rank()).any().item<bool>();
    if (own || parts.size(0) == 1) return parts[i].reshape(shape()).clone();
  }
  fail("this rank is outside the mesh, so it has no part of it");
}

DeviceMesh init_device_mesh(const std::string& device_type,
                            const std::vector<int64_t>& mesh_shape,
                            const DeviceMeshOptions& options) {
  if (mesh_shape.empty()) fail("mesh_shape is empty");
  int64_t ranks = 1;
  for (const int64_t size : mesh_shape) {
    if (size < 1) {
      fail("a dimension of the mesh has size " + std::to_string(size) +
           "; sizes begin at 1");
    }
    ranks *= size;
  }
  return {
      device_type, at::arange(ranks, at::kInt).reshape(mesh_shape), options};
}

}  // namespace lockstep
