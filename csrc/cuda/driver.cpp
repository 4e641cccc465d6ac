#include "driver.h"

#include <c10/cuda/CUDAGuard.h>
#include <cudaTypedefs.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "../group/layout.h"
#include "../group/segment.h"
#include "check.h"

namespace streamoverlap::cuda {
namespace {

template <class Function>
Function look_up(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  STREAMOVERLAP_CHECK(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error("the CUDA driver has no " + std::string(name) + " of version " +
                             std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) +
                             "; expected a driver for CUDA 12 or newer");
  }
  return reinterpret_cast<Function>(function);
}

struct Driver {
  PFN_cuStreamBatchMemOp_v11070 batch = look_up<PFN_cuStreamBatchMemOp_v11070>("cuStreamBatchMemOp", 11070);
  PFN_cuStreamWriteValue32_v11070 write = look_up<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32", 11070);
  PFN_cuStreamWaitValue32_v11070 wait = look_up<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32", 11070);
  PFN_cuMemHostRegister_v6050 register_host = look_up<PFN_cuMemHostRegister_v6050>("cuMemHostRegister", 6050);
  PFN_cuMemHostUnregister_v4000 unregister_host = look_up<PFN_cuMemHostUnregister_v4000>("cuMemHostUnregister", 4000);
  PFN_cuMemHostGetDevicePointer_v3020 device_pointer =
      look_up<PFN_cuMemHostGetDevicePointer_v3020>("cuMemHostGetDevicePointer", 3020);
  PFN_cuDeviceGet_v2000 device = look_up<PFN_cuDeviceGet_v2000>("cuDeviceGet", 2000);
  PFN_cuDeviceGetAttribute_v2000 attribute = look_up<PFN_cuDeviceGetAttribute_v2000>("cuDeviceGetAttribute", 2000);
  PFN_cuGetErrorName_v6000 error_name = look_up<PFN_cuGetErrorName_v6000>("cuGetErrorName", 6000);
  PFN_cuGetErrorString_v6000 error_string = look_up<PFN_cuGetErrorString_v6000>("cuGetErrorString", 6000);
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

bool has(CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  STREAMOVERLAP_CHECK(driver().attribute(&value, attribute, device));
  return value != 0;
}

constexpr std::chrono::seconds kTrial{10};

// Whether a stream of the device sets, awaits and sets again a word of shared memory.
bool try_memory_ops(int device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  struct Page {
    std::shared_ptr<Segment> segment = Segment::create(sizeof(Word));
    Registration registration{segment->data(), segment->bytes()};
  };
  auto page = std::make_unique<Page>();
  auto& word = *reinterpret_cast<Word*>(page->segment->data());
  const CUdeviceptr address = page->registration.device();
  cudaStream_t stream{};
  STREAMOVERLAP_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MemoryOp ops[] = {write_value(address, 1), wait_value(address, 1), write_value(address, 2)};
  enqueue(ops, 3, stream, /*capturing=*/false);
  const auto deadline = std::chrono::steady_clock::now() + kTrial;
  while (word.load(std::memory_order_acquire) != 2 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (word.load(std::memory_order_acquire) != 2) {
    word.store(1, std::memory_order_release);  // lets the stream end, if it ever comes this far
    static_cast<void>(page.release());         // it may still write there
    return false;
  }
  STREAMOVERLAP_CHECK(cudaStreamDestroy(stream));
  return true;
}

}  // namespace

MemoryOp write_value(CUdeviceptr word, std::uint32_t value) {
  MemoryOp op{};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  op.writeValue.address = word;
  op.writeValue.value = value;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return op;
}

MemoryOp wait_value(CUdeviceptr word, std::uint32_t value) {
  MemoryOp op{};
  op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  op.waitValue.address = word;
  op.waitValue.value = value;
  op.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  return op;
}

void enqueue(MemoryOp* ops, int count, cudaStream_t stream, bool capturing) {
  if (!capturing) {
    STREAMOVERLAP_CHECK(driver().batch(stream, count, ops, 0));
    return;
  }
  // One node an op: the order of ops is an edge of the graph then, whatever a driver makes of a batch.
  for (int i = 0; i < count; ++i) {
    if (ops[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      const auto& op = ops[i].writeValue;
      STREAMOVERLAP_CHECK(driver().write(stream, op.address, op.value, op.flags));
    } else {
      const auto& op = ops[i].waitValue;
      STREAMOVERLAP_CHECK(driver().wait(stream, op.address, op.value, op.flags));
    }
  }
}

Registration::Registration(void* host, std::size_t bytes) {
  // The driver wants a context, which this thread need not have yet: a guard of a device that is current makes none.
  int device = 0;
  STREAMOVERLAP_CHECK(cudaGetDevice(&device));
  STREAMOVERLAP_CHECK(cudaSetDevice(device));
  STREAMOVERLAP_CHECK(driver().register_host(host, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
  host_ = host;
  const CUresult result = driver().device_pointer(&device_, host, 0);
  if (result != CUDA_SUCCESS) {
    driver().unregister_host(std::exchange(host_, nullptr));
    throw_error(result, "cuMemHostGetDevicePointer", __FILE__, __LINE__);
  }
}

Registration::~Registration() {
  if (host_) driver().unregister_host(host_);
}

Registration::Registration(Registration&& other) noexcept
    : host_(std::exchange(other.host_, nullptr)), device_(other.device_) {}

std::string error_name(CUresult error) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver().error_name(error, &name);
  driver().error_string(error, &text);
  return std::string(name ? name : "an unknown error " + std::to_string(error)) +
         (text ? std::string(", ") + text : "");
}

std::string unsupported(int device, const int* peers, int count) {
  try {
    CUdevice handle{};
    STREAMOVERLAP_CHECK(driver().device(&handle, device));
    if (!has(handle, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)) {
      return "device " + std::to_string(device) + " cannot register host memory";
    }
    for (int i = 0; i < count; ++i) {
      int reachable = 1;
      if (peers[i] != device) STREAMOVERLAP_CHECK(cudaDeviceCanAccessPeer(&reachable, device, peers[i]));
      if (!reachable) {
        return "device " + std::to_string(device) + " cannot access the memory of device " + std::to_string(peers[i]);
      }
    }
    if (!try_memory_ops(device)) {
      return "device " + std::to_string(device) + " did not carry out stream memory operations within " +
             std::to_string(kTrial.count()) + " s";
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace streamoverlap::cuda
