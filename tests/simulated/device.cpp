// A simulated accelerator: two devices whose work is done as late as their streams and events allow.
//
// An operation is put at the end of its stream's queue, and its result has a shape but no bytes yet. The queue is worked
// off when the host waits for it: by Stream.synchronize, by Event.synchronize, by a copy that blocks, by item(). What
// other streams have to do is done later (order 0), or before (order 1), or partly before (a seed), unless an event
// forbids it. Thus whoever reads before a wait, changes a buffer too early or forgets the order of two streams gets wrong
// bytes, each time. Memory that is used again is first filled with 0xFF.
//
// Addresses of tensors cannot be read: what they hold lies at a fixed distance from them.

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

namespace {

using at::IValue;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;
using Lock = std::unique_lock<std::mutex>;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;
constexpr size_t SPACE = size_t(1) << 35; // addresses of one device
constexpr size_t LONGEST = 20000;         // queue, in tasks

// --- memory --------------------------------------------------------------------------------------------------------

char* reserve(int protection) {
  void* found = mmap(nullptr, DEVICES * SPACE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != MAP_FAILED, "no addresses for the simulated device");
  return static_cast<char*>(found);
}

char* const fence = reserve(PROT_NONE);
char* const cells = reserve(PROT_READ | PROT_WRITE);

bool is_fenced(const void* address) {
  return address >= fence && address < fence + DEVICES * SPACE;
}

void* behind(const void* address) {
  return is_fenced(address) ? cells + (static_cast<const char*>(address) - fence) : const_cast<void*>(address);
}

// --- streams -------------------------------------------------------------------------------------------------------

using Place = std::pair<DeviceIndex, c10::StreamId>;

struct Mark { // a place in a stream's queue
  Place stream{0, 0};
  uint64_t end = 0;
};

struct Task {
  std::function<void()> work; // none: wait for `after`
  Mark after;
};

struct Queue {
  std::deque<Task> tasks;
  uint64_t queued = 0, done = 0;
};

struct Block {
  size_t size = 0;
  Place stream{0, 0};
  std::vector<Mark> users; // by record_stream
};

struct Machine {
  std::mutex lock;
  std::condition_variable grown;
  std::map<Place, Queue> queues;
  uint64_t launched = 0, waits = 0, own_waits = 0, order = 0, patience = 0;
  bool forbids_waits = false;
  c10::StreamId newest = 0;
  std::mt19937_64 chance;
  std::string failure;
  std::map<char*, Block> blocks;
  std::vector<std::pair<char*, Block>> limbo; // freed, and still in use by a stream
  std::map<std::pair<Place, size_t>, std::vector<char*>> free;
  size_t used[DEVICES] = {};
  c10::CachingDeviceAllocator::DeviceStats stats[DEVICES];
  std::map<char*, std::pair<size_t, Mark>> pinned;
  std::vector<char*> unpinned; // freed
  at::ThreadLocalState pristine;
};

Machine& machine = *new Machine; // never destroyed: tensors outlive it

thread_local DeviceIndex current = 0;
thread_local std::map<DeviceIndex, c10::StreamId> streams;

Place place_of(c10::Stream stream) {
  return {stream.device_index(), stream.id()};
}

Place current_place(DeviceIndex device) {
  return {device, streams[device]};
}

Mark end_of(Place place) {
  return {place, machine.queues[place].queued};
}

bool is_done(const Mark& mark) {
  return machine.queues[mark.stream].done >= mark.end;
}

void work_off(const Mark& until) {
  Queue& queue = machine.queues[until.stream];
  while (queue.done < until.end) {
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    if (task.work == nullptr) {
      work_off(task.after);
    } else {
      try {
        at::ThreadLocalStateGuard guard(machine.pristine);
        task.work();
      } catch (const std::exception& error) {
        if (machine.failure.empty())
          machine.failure = error.what();
      }
    }
    queue.done++;
  }
}

void put(Place place, Task task) {
  Queue& queue = machine.queues[place];
  queue.tasks.push_back(std::move(task));
  queue.queued++;
  machine.launched++;
  machine.grown.notify_all();
  if (queue.tasks.size() > LONGEST)
    work_off({place, queue.done + LONGEST / 2});
}

void launch(Place place, std::function<void()> work) {
  Lock lock(machine.lock);
  put(place, {std::move(work), {}});
}

// Whatever no event forbids may happen before what is waited for, or after it.
void work_off_with_others(const std::vector<Mark>& wanted) {
  std::vector<Mark> others;
  for (auto& [place, queue] : machine.queues) {
    bool is_wanted = false;
    for (const Mark& mark : wanted)
      is_wanted = is_wanted || mark.stream == place;
    if (!is_wanted) {
      uint64_t length = queue.tasks.size();
      uint64_t share = machine.order == 0 ? 0 : machine.order == 1 ? length : machine.chance() % (length + 1);
      others.push_back({place, queue.done + share});
    }
  }
  for (const Mark& mark : others)
    work_off(mark);
  for (const Mark& mark : wanted)
    work_off(mark);
}

void wait_for(Lock& lock, const std::vector<Mark>& marks) {
  bool waits = false;
  for (const Mark& mark : marks)
    waits = waits || !is_done(mark);
  if (waits) {
    bool trains = getpid() == syscall(SYS_gettid);
    machine.waits++;
    machine.own_waits += trains;
    TORCH_CHECK(!machine.forbids_waits, "the host waits for the simulated device");
    if (machine.patience != 0 && !trains) {
      // Another thread than the one that trains: let that one hurry on, as it does while a real copy takes its time.
      uint64_t goal = machine.launched + machine.patience;
      machine.grown.wait_for(lock, std::chrono::milliseconds(500), [&] { return machine.launched >= goal; });
    }
    work_off_with_others(marks);
  }
  std::string failure;
  std::swap(failure, machine.failure);
  TORCH_CHECK(failure.empty(), failure);
}

void wait_for_stream(Place place) {
  Lock lock(machine.lock);
  wait_for(lock, {end_of(place)});
}

// --- allocation ----------------------------------------------------------------------------------------------------

void give_back(char* address, const Block& block) {
  machine.free[{block.stream, block.size}].push_back(address);
}

void release(void* pointer) {
  if (pointer == nullptr)
    return;
  Lock lock(machine.lock);
  auto found = machine.blocks.find(static_cast<char*>(pointer));
  Block block = std::move(found->second);
  machine.stats[block.stream.first].allocated_bytes[0].decrease(block.size);
  machine.blocks.erase(found);
  if (block.users.empty())
    give_back(static_cast<char*>(pointer), block);
  else
    machine.limbo.emplace_back(static_cast<char*>(pointer), std::move(block));
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(KIND, current);
    if (bytes == 0)
      return {nullptr, nullptr, &release, device};
    Lock lock(machine.lock);
    for (size_t i = 0; i < machine.limbo.size();) {
      auto& [address, block] = machine.limbo[i];
      bool is_free = true;
      for (const Mark& user : block.users)
        is_free = is_free && is_done(user);
      if (is_free) {
        give_back(address, block);
        machine.limbo.erase(machine.limbo.begin() + i);
      } else {
        i++;
      }
    }
    size_t size = (bytes + 511) / 512 * 512;
    Place place = current_place(current);
    auto& free = machine.free[{place, size}];
    char* address;
    if (!free.empty()) {
      address = free.back();
      free.pop_back();
      void* bytes = behind(address);
      put(place, {[bytes, size] { memset(bytes, 0xFF, size); }, {}});
    } else {
      TORCH_CHECK(machine.used[current] + size <= SPACE, "the simulated device is out of memory");
      address = fence + current * SPACE + machine.used[current];
      machine.used[current] += size;
    }
    machine.blocks[address] = {size, place, {}};
    machine.stats[current].allocated_bytes[0].increase(size);
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    void *target = behind(to), *source = behind(from);
    launch(current_place(current), [=] { memcpy(target, source, bytes); });
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(machine.lock);
    auto found = machine.blocks.find(static_cast<char*>(pointer.get()));
    if (found != machine.blocks.end() && found->second.stream != place_of(stream))
      found->second.users.push_back(end_of(place_of(stream)));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return machine.stats[device];
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    machine.stats[device].allocated_bytes[0].reset_peak();
  }
};

DeviceMemory& device_memory = *new DeviceMemory;

void release_pinned(void* pointer) {
  // Kept until no copy needs it, as torch's allocators of page-locked memory do.
  if (pointer == nullptr)
    return;
  Lock lock(machine.lock);
  machine.unpinned.push_back(static_cast<char*>(pointer));
  for (size_t i = 0; i < machine.unpinned.size();) {
    char* address = machine.unpinned[i];
    auto& [size, user] = machine.pinned[address];
    if (is_done(user)) {
      memset(address, 0xFF, size);
      free(address);
      machine.pinned.erase(address);
      machine.unpinned.erase(machine.unpinned.begin() + i);
    } else {
      i++;
    }
  }
}

std::map<char*, std::pair<size_t, Mark>>::iterator pinned_block(const void* pointer) {
  auto* address = static_cast<char*>(const_cast<void*>(pointer));
  auto found = machine.pinned.upper_bound(address);
  if (found == machine.pinned.begin())
    return machine.pinned.end();
  --found;
  return address < found->first + found->second.first ? found : machine.pinned.end();
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0)
      return {nullptr, nullptr, &release_pinned, Device(c10::DeviceType::CPU)};
    auto* address = static_cast<char*>(aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
    memset(address, 0xFF, bytes);
    Lock lock(machine.lock);
    machine.pinned[address] = {bytes, {}};
    return {address, address, &release_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory& pinned_memory = *new PinnedMemory;

// --- random numbers ------------------------------------------------------------------------------------------------

// A seed and how many operations have drawn: known on the host without waiting for the device.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device)
      : c10::GeneratorImpl(Device(KIND, device), DispatchKeySet(DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t value) override {
    state[0] = value;
    state[1] = 0;
  }
  void set_offset(uint64_t offset) override {
    state[1] = offset;
  }
  uint64_t get_offset() const override {
    return state[1];
  }
  uint64_t current_seed() const override {
    return state[0];
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state[0];
  }
  void set_state(const c10::TensorImpl& saved) override {
    TORCH_CHECK(saved.dtype() == caffe2::TypeMeta::Make<uint8_t>() && saved.numel() == sizeof state, "no such state");
    memcpy(state, saved.data(), sizeof state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto saved = at::detail::empty_cpu({sizeof state}, at::kByte);
    memcpy(saved.mutable_data_ptr(), state, sizeof state);
    return saved.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* twin = new Generator(device_.index());
    memcpy(twin->state, state, sizeof state);
    return twin;
  }
  // The generator of the next operation.
  at::Generator draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::seed_seq mixed{state[0], state[0] >> 32, state[1], state[1] >> 32, uint64_t(device_.index())};
    uint64_t own[1];
    mixed.generate(reinterpret_cast<uint32_t*>(own), reinterpret_cast<uint32_t*>(own + 1));
    state[1]++;
    return at::detail::createCPUGenerator(own[0]);
  }
  uint64_t state[2] = {c10::default_rng_seed_val, 0};
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*all)[device < 0 ? current : device];
}

// --- what torch asks a device --------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    TORCH_CHECK(device >= 0 && device < DEVICES, "no simulated device ", int(device));
    current = device;
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    if (device >= 0)
      std::swap(device, current);
    return device;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current : device);
  }
  Device getDeviceFromPtr(void* data) const override {
    return {KIND, DeviceIndex((static_cast<char*>(data) - fence) / SPACE)};
  }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(machine.lock);
    return pinned_block(data) != machine.pinned.end();
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    DeviceIndex before = exchangeDevice(storage.device().index());
    c10::DataPtr data = device_memory.allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes()); kept != 0)
      device_memory.copy_data(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    exchangeDevice(before);
  }
};

struct Recorded { // an event
  Mark mark;
  std::chrono::steady_clock::time_point at;
  int queries = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return KIND;
  }
  Device exchangeDevice(Device device) const override {
    DeviceIndex index = device.index();
    if (index >= 0)
      std::swap(index, current);
    return {KIND, index >= 0 ? index : current};
  }
  Device getDevice() const override {
    return {KIND, current};
  }
  void setDevice(Device device) const override {
    if (device.index() >= 0)
      current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0)
      current = device.index();
  }
  c10::Stream getStream(Device device) const override {
    DeviceIndex index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, index), streams[index]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, device.index() < 0 ? current : device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(Device device, int) const override {
    Lock lock(machine.lock);
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, device.index() < 0 ? current : device.index()), ++machine.newest);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr)
      *event = new Recorded;
    Lock lock(machine.lock);
    *static_cast<Recorded*>(*event) = {end_of(place_of(stream)), std::chrono::steady_clock::now(), 0};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr)
      return;
    Lock lock(machine.lock);
    const Mark& mark = static_cast<Recorded*>(event)->mark;
    if (mark.stream != place_of(stream))
      put(place_of(stream), {nullptr, mark});
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr)
      return true;
    Lock lock(machine.lock);
    auto& recorded = *static_cast<Recorded*>(event);
    if (++recorded.queries == 3) // time goes by
      work_off_with_others({recorded.mark});
    return is_done(recorded.mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr)
      return;
    Lock lock(machine.lock);
    wait_for(lock, {static_cast<Recorded*>(event)->mark});
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    Lock lock(machine.lock);
    TORCH_CHECK(
        is_done(static_cast<Recorded*>(first)->mark) && is_done(static_cast<Recorded*>(second)->mark),
        "the time between events that are not over");
    std::chrono::duration<double, std::milli> elapsed =
        static_cast<Recorded*>(second)->at - static_cast<Recorded*>(first)->at;
    return elapsed.count();
  }
  DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(machine.lock);
    return is_done(end_of(place_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for_stream(place_of(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Lock lock(machine.lock);
    std::vector<Mark> all;
    for (auto& [place, queue] : machine.queues)
      if (place.first == device)
        all.push_back(end_of(place));
    wait_for(lock, all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }
};

// --- operations ----------------------------------------------------------------------------------------------------

Tensor bytes_of(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0)
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(behind(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, DeviceIndex device) {
  c10::DeviceGuard guard(Device(KIND, device));
  DispatchKeySet keys(DispatchKey::PrivateUse1);
  return Tensor(at::detail::empty_strided_generic(sizes, strides, &device_memory, keys, dtype));
}

void copy_now(const Tensor& target, const Tensor& source) {
  target.copy_(source);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  bool from_device = source.device().type() == KIND, to_device = target.device().type() == KIND;
  if (target.numel() == 0)
    return target;
  Tensor here = bytes_of(target), there = bytes_of(source);
  if (from_device && to_device) {
    Place place = current_place(source.device().index()), other = current_place(target.device().index());
    Lock lock(machine.lock);
    if (place != other)
      put(place, {nullptr, end_of(other)});
    put(place, {[=] { copy_now(here, there); }, {}});
    if (place != other)
      put(other, {nullptr, end_of(place)});
    return target;
  }
  const Tensor& on_host = from_device ? target : source;
  Place place = current_place((from_device ? source : target).device().index());
  bool is_pinned;
  {
    Lock lock(machine.lock);
    auto block = pinned_block(on_host.data_ptr());
    is_pinned = block != machine.pinned.end();
    if (is_pinned)
      block->second.second = {place, machine.queues[place].queued + 1};
  }
  if (!is_pinned && to_device && non_blocking)
    there = there.clone(); // the driver takes it first
  c10::weak_intrusive_ptr<c10::StorageImpl> memory(on_host.storage().getWeakStorageImpl());
  bool may_vanish = from_device && !is_pinned && non_blocking;
  launch(place, [=] {
    TORCH_CHECK(!may_vanish || !memory.expired(), "memory of the host was freed before a copy into it arrived");
    copy_now(here, there);
  });
  if (!non_blocking)
    wait_for_stream(place);
  return target;
}

// What an argument is on another device: the same values on the CPU, or the same shapes on `meta`.
IValue translated(const IValue& value, const std::function<Tensor(const Tensor&)>& translate, Device device) {
  if (value.isTensor())
    return value.toTensor().defined() ? IValue(translate(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& each : value.toTensorVector())
      all.push_back(each.defined() ? translate(each) : each);
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      all.push_back(each.has_value() && each->defined() ? std::optional<Tensor>(translate(*each)) : each);
    return all;
  }
  if (value.isDevice())
    return IValue(device);
  return value;
}

std::vector<Tensor> tensors_in(const IValue& value) {
  std::vector<Tensor> found;
  translated(value, [&](const Tensor& each) { found.push_back(each); return each; }, at::kCPU);
  return found;
}

DeviceIndex device_of(const std::vector<IValue>& arguments, const std::string& name) {
  DeviceIndex found = -1;
  for (const IValue& value : arguments) {
    if (value.isDevice() && found < 0 && value.toDevice().type() == KIND)
      found = value.toDevice().index() < 0 ? current : value.toDevice().index();
    for (const Tensor& each : tensors_in(value)) {
      if (each.device().type() == KIND) {
        TORCH_CHECK(found < 0 || found == each.device().index(), name, ": tensors of two simulated devices");
        found = each.device().index();
      } else {
        TORCH_CHECK(each.dim() == 0 || name.find("index") != std::string::npos, name, ": a tensor of the host");
      }
    }
  }
  return found < 0 ? current : found;
}

const IValue* aliased(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments, size_t number) {
  const auto* alias = schema.returns()[number].alias_info();
  if (alias == nullptr)
    return nullptr;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* own = schema.arguments()[i].alias_info();
    if (own != nullptr && own->beforeSets() == alias->beforeSets())
      return &arguments[i];
  }
  return nullptr;
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = op.operator_name().name;
  size_t count = schema.arguments().size();
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  DeviceIndex device = device_of(arguments, name);
  Place place = current_place(device);

  // A result that is given (out=) may be resized on the way: its place is filled from a fresh tensor.
  bool is_given = schema.overload_name().find("out") != std::string::npos || schema.overload_name() == "grad_input";
  auto is_out = [&](size_t number) {
    const auto* alias = schema.arguments()[number].alias_info();
    return is_given && alias != nullptr && alias->isWrite() && arguments[number].isTensor();
  };
  Stack on_host, on_meta;
  for (size_t i = 0; i < count; i++) {
    const IValue& value = arguments[i];
    if (is_out(i)) {
      auto options = value.toTensor().options();
      on_host.push_back(at::empty({0}, options.device(at::kCPU)));
      on_meta.push_back(at::empty({0}, options.device(at::kMeta)));
      continue;
    }
    on_host.push_back(translated(
        value,
        [](const Tensor& each) { return each.device().type() == KIND ? bytes_of(each) : each.clone(); },
        at::kCPU));
    on_meta.push_back(translated(
        value,
        [](const Tensor& each) {
          return each.device().type() == KIND ? at::empty_strided(each.sizes(), each.strides(), each.options().device(at::kMeta))
                                              : each;
        },
        at::kMeta));
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) {
      at::Generator own = value.isGenerator() ? value.toGenerator() : default_generator(device);
      on_host.back() = IValue(static_cast<Generator*>(own.unsafeGetGeneratorImpl())->draw());
      on_meta.back() = IValue();
    }
  }

  // Results that are new tensors have the shapes that the operation has on `meta`.
  bool needs_shapes = false, is_known = true;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto* alias = schema.returns()[i].alias_info();
    needs_shapes = needs_shapes || alias == nullptr || !alias->isWrite();
    auto type = schema.returns()[i].type();
    is_known = is_known && (type->isSubtypeOf(*c10::TensorType::get()) || type->str() == "Tensor[]");
  }
  needs_shapes = needs_shapes || is_given;
  if (needs_shapes && is_known) {
    try {
      at::ThreadLocalStateGuard guard(machine.pristine);
      op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &on_meta);
    } catch (const std::exception&) {
      is_known = false; // they depend on the values
    }
  }
  if (!is_known) {
    wait_for_stream(place);
    Lock lock(machine.lock);
    at::ThreadLocalStateGuard guard(machine.pristine);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &on_host);
    on_meta = on_host;
  }
  std::vector<IValue> results;
  std::vector<std::pair<size_t, std::vector<Tensor>>> fresh;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto* alias = schema.returns()[i].alias_info();
    const IValue* argument = aliased(schema, arguments, i);
    if (argument != nullptr && alias->isWrite()) {
      if (is_out(argument - arguments.data())) {
        const Tensor& given = argument->toTensor();
        if (given.sizes() != on_meta[i].toTensor().sizes())
          at::native::resize_(given, on_meta[i].toTensor().sizes());
        fresh.emplace_back(i, std::vector<Tensor>{bytes_of(given)});
      }
      results.push_back(*argument);
    } else if (argument != nullptr && argument->isTensor()) {
      const Tensor& view = on_meta[i].toTensor();
      results.push_back(at::native::as_strided_tensorimpl(
          argument->toTensor(), view.sizes(), view.strides(), view.storage_offset() + argument->toTensor().storage_offset()));
    } else if (!on_meta[i].isTensor() && !on_meta[i].isTensorList()) {
      results.push_back(on_meta[i]);
    } else {
      std::vector<Tensor> places;
      results.push_back(translated(
          on_meta[i],
          [&](const Tensor& each) {
            Tensor result = allocate(each.sizes(), each.strides(), each.scalar_type(), device);
            places.push_back(bytes_of(result));
            return result;
          },
          Device(KIND, device)));
      fresh.emplace_back(i, std::move(places));
    }
  }
  auto fill = [fresh](const Stack& values) {
    for (const auto& [number, places] : fresh) {
      std::vector<Tensor> found = tensors_in(values[number]);
      for (size_t i = 0; i < places.size(); i++)
        copy_now(places[i], found[i]);
    }
  };
  if (is_known) {
    launch(place, [op, on_host, fill]() mutable {
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &on_host);
      fill(on_host);
    });
  } else {
    Lock lock(machine.lock);
    at::ThreadLocalStateGuard guard(machine.pristine);
    fill(on_host);
  }
  for (IValue& each : results)
    stack->push_back(std::move(each));
}

Tensor empty_memory_format(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(KIND)));
  DispatchKeySet keys(DispatchKey::PrivateUse1);
  return Tensor(at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  DeviceIndex index = device.has_value() && device->index() >= 0 ? device->index() : current;
  return allocate(size, stride, c10::dtype_or_default(dtype), index);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  wait_for_stream(current_place(self.device().index()));
  return bytes_of(self).item();
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_memory.recordStream(self.storage().data_ptr(), stream);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true))
    return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

int64_t use_math(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0; // of at::SDPBackend: no kernel of its own
}

// --- collectives ---------------------------------------------------------------------------------------------------

struct Finished final : c10d::Work {
  explicit Finished(const IValue& value)
      : future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
    future->markCompleted(value);
    finish();
  }
  bool wait(std::chrono::milliseconds) override {
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

IValue copied(const IValue& value, std::vector<std::pair<Tensor, Tensor>>& pairs) {
  if (value.isTensor() || value.isTensorList()) {
    return translated(
        value,
        [&](const Tensor& each) {
          if (each.device().type() != KIND)
            return each;
          pairs.emplace_back(each, each.to(at::kCPU));
          return pairs.back().second;
        },
        at::kCPU);
  }
  if (value.isList()) { // of lists of tensors
    c10::impl::GenericList all(c10::ListType::ofTensors());
    for (const IValue& each : value.toListRef())
      all.push_back(copied(each, pairs));
    return all;
  }
  return value;
}

// Over the host, with the backend that the group has for it.
void collective(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  size_t count = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  std::vector<std::pair<Tensor, Tensor>> pairs;
  Stack on_host;
  size_t results = 0; // the tensors of the first argument
  for (const IValue& value : arguments) {
    on_host.push_back(copied(value, pairs));
    if (on_host.size() == 1)
      results = pairs.size();
  }
  Stack called = on_host;
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &called);
  called.back().toCustomClass<c10d::Work>()->wait();
  for (size_t i = 0; i < results; i++)
    pairs[i].first.copy_(pairs[i].second);
  for (size_t i = 0; i + 1 < called.size(); i++) {
    const IValue* argument = aliased(op.schema(), arguments, i);
    stack->push_back(argument == nullptr ? arguments[0] : *argument);
  }
  c10::List<Tensor> value;
  for (const IValue& each : arguments) {
    if (each.isTensor() || each.isTensorList()) {
      for (const Tensor& tensor : tensors_in(each))
        value.push_back(tensor);
      break;
    }
  }
  stack->push_back(IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<Finished>(value))));
}

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &use_math)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    int64_t length = source.nbytes() / self.element_size();
    return at::native::set_storage_cpu_(self, source, 0, {length}, {});
  });
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (const char* name :
       {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
}

TORCH_LIBRARY(simulated, m) {
  m.def("begin(int order, int patience) -> ()", [](int64_t order, int64_t patience) {
    static bool is_registered = false;
    if (!is_registered) {
      is_registered = true;
      c10::SetAllocator(KIND, &device_memory, 1);
      at::RegisterPrivateUse1HooksInterface(new Hooks);
      c10::impl::registerDeviceGuard(KIND, new Guard);
    }
    machine.order = order;
    machine.patience = patience;
    machine.chance.seed(order);
  });
  m.def("waits(bool own) -> int", [](bool own) { return int64_t(own ? machine.own_waits : machine.waits); });
  m.def("forbid_waits(bool forbid) -> ()", [](bool forbid) { machine.forbids_waits = forbid; });
  m.def("generator(int device) -> Generator?", [](int64_t device) { return default_generator(device); });
}
