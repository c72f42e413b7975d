#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/core/export.h"
#include "lockstep/distributed/process_group.h"

namespace lockstep {

/// Arguments of `init_device_mesh` and `DeviceMesh`, all optional.
struct DeviceMeshOptions {
  /// One name per dimension; empty: it has none.
  std::vector<std::string> mesh_dim_names = {};
};

/// A dimension of a mesh, by index or by name.
class MeshDim {
 public:
  MeshDim(int index) : dim_(index) {}
  MeshDim(const char* name) : dim_(std::string(name)) {}
  MeshDim(std::string name) : dim_(std::move(name)) {}

  [[nodiscard]] const std::variant<int, std::string>& held() const {
    return dim_;
  }

 private:
  std::variant<int, std::string> dim_;
};

/// The ranks of the job as an n-dimensional array, with a group of ranks along
/// each dimension: {2, 4} with the names "dp" and "tp" makes groups of four
/// neighbours and groups of two ranks, four apart. Copies share the groups.
/// Mirrors `torch.distributed.device_mesh.DeviceMesh`.
///
/// All members throw InvalidArgument for a dimension that is not there. Thread
/// safety: call from one thread.
class LOCKSTEP_API DeviceMesh {
 public:
  /// From an integer tensor of global ranks, each there at most once.
  /// Collective over the default group, which it makes where there is none.
  /// Throws as `new_group`, and InvalidArgument where ranks, names or the
  /// device type ("cpu", "cuda", without an index) are wrong.
  DeviceMesh(const std::string& device_type,
             const at::Tensor& mesh,
             const DeviceMeshOptions& options = {});

  /// A mesh of one dimension from a group that is there. No communication.
  static DeviceMesh from_group(const ProcessGroup& group,
                               const std::string& device_type,
                               const DeviceMeshOptions& options = {});
  /// A mesh from one group per dimension of `mesh`, all with names.
  static DeviceMesh from_group(const std::vector<ProcessGroup>& groups,
                               const std::string& device_type,
                               const at::Tensor& mesh,
                               const DeviceMeshOptions& options);

  /// The part of the mesh along one dimension that holds this rank, with its
  /// group. The name of a flattened dimension is good on the whole mesh. No
  /// communication.
  [[nodiscard]] DeviceMesh operator[](const std::string& name) const;
  /// The same along several dimensions, in the mesh's order: `mesh[{"dp",
  /// "cp"}]`.
  [[nodiscard]] DeviceMesh operator[](
      std::initializer_list<std::string> names) const;
  [[nodiscard]] DeviceMesh slice(const std::vector<std::string>& names) const;

  /// The mesh as one dimension, which has a group of its own: afterwards also
  /// the whole mesh knows it by `mesh_dim_name`; empty: the names joined by
  /// '_'. Collective over the default group the first time. Mirrors
  /// `DeviceMesh._flatten`.
  [[nodiscard]] DeviceMesh flatten(const std::string& mesh_dim_name = {}) const;

  /// The group of this rank along a dimension; it may be left out where there
  /// is one only. In a rank outside the mesh it says that it is no member.
  [[nodiscard]] ProcessGroup get_group(
      const std::optional<MeshDim>& mesh_dim = {}) const;
  /// One per dimension.
  [[nodiscard]] std::vector<ProcessGroup> get_all_groups() const;
  /// This rank's number in that group; -1 outside the mesh.
  [[nodiscard]] int get_local_rank(
      const std::optional<MeshDim>& mesh_dim = {}) const;
  /// Own global rank.
  [[nodiscard]] int get_rank() const;
  /// Where this rank is, one index per dimension; nothing outside the mesh.
  [[nodiscard]] std::optional<std::vector<int64_t>> get_coordinate() const;

  /// Number of ranks along a dimension, or in all.
  [[nodiscard]] int64_t size(const std::optional<MeshDim>& mesh_dim = {}) const;
  [[nodiscard]] int64_t ndim() const;
  [[nodiscard]] std::vector<int64_t> shape() const;
  /// Empty where dimensions have no names.
  [[nodiscard]] const std::vector<std::string>& mesh_dim_names() const {
    return names_;
  }
  [[nodiscard]] const std::string& device_type() const;
  /// The global ranks, an int32 tensor on the CPU.
  /// \throws InvalidArgument for a slice in a rank outside the mesh
  [[nodiscard]] at::Tensor mesh() const;

 private:
  struct Root;
  /// The dimensions of the root that make up one dimension.
  using Axis = std::vector<size_t>;

  DeviceMesh(std::shared_ptr<Root> root,
             std::vector<std::string> names,
             std::vector<Axis> axes);
  static DeviceMesh without_groups(const std::string& device_type,
                                   const at::Tensor& mesh,
                                   const DeviceMeshOptions& options);
  [[nodiscard]] size_t index_of(const std::optional<MeshDim>& mesh_dim) const;

  std::shared_ptr<Root> root_;
  std::vector<std::string> names_;
  std::vector<Axis> axes_;
  std::vector<ProcessGroup> groups_;  ///< by dimension
};

/// A mesh of the ranks 0, 1, ... in the given shape, the last dimension the
/// fastest. See the constructor of `DeviceMesh`. Mirrors
/// `torch.distributed.init_device_mesh`.
[[nodiscard]] LOCKSTEP_API DeviceMesh
init_device_mesh(const std::string& device_type,
                 const std::vector<int64_t>& mesh_shape,
                 const DeviceMeshOptions& options = {});

}  // namespace lockstep
