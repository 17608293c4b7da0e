#include "cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

#include "tile_copy.cuh"
#include "tile_table.h"

namespace mht {
namespace {

// Two such blocks fill a multiprocessor with 64 registers a thread; one still leaves room for others' blocks.
constexpr uint32_t kBlockThreads = 512;
constexpr uint32_t kBlockWarps = kBlockThreads / kWarpLanes;
constexpr int32_t kBlocksPerSm = 2;

template <Operation operation>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerSm) move_tiles(const TileTable table) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / kWarpLanes;
  run_lane<operation>(table, warp, static_cast<int64_t>(gridDim.x) * kBlockWarps, threadIdx.x % kWarpLanes);
}

const void* kernel_of(Operation operation) {
  switch (operation) {
    case Operation::kGather:
      return reinterpret_cast<const void*>(move_tiles<Operation::kGather>);
    case Operation::kScatter:
      return reinterpret_cast<const void*>(move_tiles<Operation::kScatter>);
    default:
      return reinterpret_cast<const void*>(move_tiles<Operation::kClear>);
  }
}

// The calling thread's device, changed for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    status_ = cudaGetDevice(&before_);
    if (status_ == cudaSuccess && before_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaError_t status() const { return status_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t status_;
};

// One call at a time: its table in pinned memory, the copy of it on the device, and the event behind its launch.
struct Place {
  char* pinned = nullptr;
  char* on_device = nullptr;
  cudaEvent_t event = nullptr;
  bool was_used = false;
};

mht_status status_of(cudaError_t error) { return static_cast<mht_status>(error); }

mht_status event_status(cudaError_t error) {
  return error == cudaErrorNotReady ? static_cast<mht_status>(MHT_NOT_READY) : status_of(error);
}

}  // namespace
}  // namespace mht

struct mht_cuda_context {
  mht::ContextSize size{};
  int32_t most_blocks = 0;
  std::vector<mht::Place> places;
  std::mutex mutex;       // of what follows, and of the order of submission
  int64_t submitted = 0;  // the next ticket; place ticket % places.size()
};

namespace mht {
namespace {

void free_places(mht_cuda_context* context) {
  for (Place& place : context->places) {
    if (place.event != nullptr) cudaEventDestroy(place.event);
    if (place.on_device != nullptr) cudaFree(place.on_device);
    if (place.pinned != nullptr) cudaFreeHost(place.pinned);
  }
}

cudaError_t make_place(size_t bytes, Place* place) {
  cudaError_t error = cudaHostAlloc(reinterpret_cast<void**>(&place->pinned), bytes, cudaHostAllocPortable);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void**>(&place->on_device), bytes);
  // A thread that waits sleeps: workers have better uses for a core.
  const unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync;
  return error == cudaSuccess ? cudaEventCreateWithFlags(&place->event, flags) : error;
}

// Kernels are loaded on first use otherwise, which allocates and may synchronise.
cudaError_t load_kernels() {
  cudaError_t error = cudaSuccess;
  for (const Operation operation : {Operation::kGather, Operation::kScatter, Operation::kClear}) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel_of(operation));
  }
  return error;
}

cudaError_t fill_context(mht_cuda_context* context) {
  int sms = 0;
  cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, context->size.device);
  if (error == cudaSuccess) error = load_kernels();
  const bool is_bounded = context->size.sms > 0 && context->size.sms < sms;
  // Blocks go to idle multiprocessors first, so a bounded launch has one block for each that it may use.
  context->most_blocks = is_bounded ? context->size.sms : sms * kBlocksPerSm;
  for (Place& place : context->places) {
    if (error == cudaSuccess) error = make_place(static_cast<size_t>(context->size.table_bytes), &place);
  }
  return error;
}

cudaError_t enqueue(const mht_cuda_context& context, const TileTable& tiles, size_t bytes, Operation operation,
                    const Place& place, cudaStream_t stream) {
  if (tiles.tiles == 0) return cudaSuccess;
  const cudaError_t copied = cudaMemcpyAsync(place.on_device, place.pinned, bytes, cudaMemcpyHostToDevice, stream);
  if (copied != cudaSuccess) return copied;
  const int64_t wanted = (tiles.tiles - 1) / kBlockWarps + 1;
  const dim3 blocks(static_cast<unsigned>(std::min<int64_t>(wanted, context.most_blocks)));
  TileTable argument = tiles;
  void* arguments[] = {&argument};
  return cudaLaunchKernel(kernel_of(operation), blocks, dim3(kBlockThreads), arguments, 0, stream);
}

bool is_known(const mht_cuda_context& context, int64_t ticket) { return ticket >= 0 && ticket < context.submitted; }

// The place of a call that may still run; null: it is over, as the place has been used again.
Place* place_of(mht_cuda_context* context, int64_t ticket) {
  const int64_t calls = static_cast<int64_t>(context->places.size());
  return ticket + calls < context->submitted ? nullptr : &context->places[static_cast<size_t>(ticket % calls)];
}

}  // namespace

int32_t cuda_version() noexcept { return CUDART_VERSION; }

mht_status cuda_device_count(int32_t* count) noexcept {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  *count = error == cudaSuccess ? devices : 0;
  return status_of(error);
}

const char* cuda_status_text(mht_status status) noexcept {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

mht_status create_context(const ContextSize& size, mht_cuda_context** context) noexcept {
  const OnDevice on(size.device);
  if (on.status() != cudaSuccess) return status_of(on.status());
  mht_cuda_context* made = new (std::nothrow) mht_cuda_context;
  if (made == nullptr) return MHT_NO_MEMORY;
  try {
    made->places.resize(static_cast<size_t>(size.calls));
  } catch (const std::bad_alloc&) {
    delete made;
    return MHT_NO_MEMORY;
  }
  made->size = size;
  const cudaError_t error = fill_context(made);
  if (error != cudaSuccess) {
    free_places(made);
    delete made;
    return status_of(error);
  }
  *context = made;
  return MHT_OK;
}

mht_status destroy_context(mht_cuda_context* context) noexcept {
  const OnDevice on(context->size.device);
  if (on.status() != cudaSuccess) return status_of(on.status());
  cudaError_t error = cudaSuccess;
  for (const Place& place : context->places) {
    if (place.was_used && error == cudaSuccess) error = cudaEventSynchronize(place.event);
  }
  free_places(context);
  delete context;
  return status_of(error);
}

mht_status run_on_cuda(mht_cuda_context* context, const mht_copy_table& table, Operation operation, void* stream,
                       int64_t* ticket, int64_t* row) noexcept {
  const int64_t bytes = tile_table_bytes(table.copy_count, table.offset_count);
  if (bytes < 0 || bytes > context->size.table_bytes) return MHT_TABLE_TOO_LARGE;
  const OnDevice on(context->size.device);
  if (on.status() != cudaSuccess) return status_of(on.status());
  const std::lock_guard<std::mutex> held(context->mutex);
  Place& place = context->places[static_cast<size_t>(context->submitted % context->size.calls)];
  if (place.was_used) {
    const mht_status earlier = event_status(cudaEventQuery(place.event));
    if (earlier != MHT_OK) return earlier == MHT_NOT_READY ? static_cast<mht_status>(MHT_BUSY) : earlier;
  }
  TileTable tiles{};
  const mht_status made = make_tiles(table, place.pinned, place.on_device, &tiles, row);
  if (made != MHT_OK) return made;
  cudaStream_t on_stream = static_cast<cudaStream_t>(stream);
  const cudaError_t enqueued = enqueue(*context, tiles, static_cast<size_t>(bytes), operation, place, on_stream);
  // Recorded even where the launch failed: the copy of the table may be under way.
  const cudaError_t recorded = cudaEventRecord(place.event, on_stream);
  if (recorded == cudaSuccess) place.was_used = true;
  if (enqueued != cudaSuccess || recorded != cudaSuccess) {
    return status_of(enqueued != cudaSuccess ? enqueued : recorded);
  }
  *ticket = context->submitted++;
  return MHT_OK;
}

mht_status query_call(mht_cuda_context* context, int64_t ticket) noexcept {
  const OnDevice on(context->size.device);
  if (on.status() != cudaSuccess) return status_of(on.status());
  const std::lock_guard<std::mutex> held(context->mutex);
  if (!is_known(*context, ticket)) return MHT_INVALID_ARGUMENT;
  const Place* place = place_of(context, ticket);
  return place == nullptr ? MHT_OK : event_status(cudaEventQuery(place->event));
}

mht_status wait_for_call(mht_cuda_context* context, int64_t ticket) noexcept {
  const OnDevice on(context->size.device);
  if (on.status() != cudaSuccess) return status_of(on.status());
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard<std::mutex> held(context->mutex);
    if (!is_known(*context, ticket)) return MHT_INVALID_ARGUMENT;
    const Place* place = place_of(context, ticket);
    if (place == nullptr) return MHT_OK;
    event = place->event;
  }
  // Not under the lock, or nobody could submit meanwhile. A later call that takes this place makes it a longer wait.
  return status_of(cudaEventSynchronize(event));
}

}  // namespace mht
