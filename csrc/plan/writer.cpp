#include "writer.h"

#include <utility>

#include "builders.h"

namespace streamoverlap::plan {

Writer::Writer(const Spec& spec, int rank) {
  plan_.spec = spec;
  plan_.rank = rank;
  fresh_.fill(-1);
  started_[kMain] = true;
  if (spec.copy_input) copy_input();
  begin_ = record(kMain);
}

Op& Writer::emit(Kind kind, Stream stream) {
  if (!started_[stream]) {
    started_[stream] = true;
    wait(stream, begin_);
  }
  Op op;
  op.kind = kind;
  op.stream = stream;
  plan_.ops.push_back(std::move(op));
  fresh_[stream] = -1;
  return plan_.ops.back();
}

Region Writer::source(int shard, int chunk) const {
  const Buffer buffer = plan_.spec.copy_input ? copy_of_input(plan_.spec) : Buffer::Input;
  return {buffer, rank(), shard, chunk};
}

// On main, so that it waits for nothing of this exchange or of earlier ones.
void Writer::copy_input() {
  const Shards shards = shards_of(plan_.spec, Buffer::Input, rank());
  for (int shard = shards.first; shard < shards.last; ++shard) {
    for (int chunk = 0; chunk < plan_.spec.chunks; ++chunk) copy(input(shard, chunk), source(shard, chunk), kMain);
  }
}

Stream Writer::next_compute() { return kCompute + computes_++ % plan_.spec.compute_streams; }

void Writer::gemm(Stream stream, std::vector<Region> a_and_c, const Region& d, bool bias) {
  if (d.rank != rank() && !credited_[stream]) {
    credited_[stream] = true;
    if (credits_ < 0) credits_ = record(kSend);
    started_[stream] = true;  // the credits are taken after the call has begun
    wait(stream, credits_);
  }
  Op& op = emit(Kind::Gemm, stream);
  op.reads = std::move(a_and_c);
  if (spec().scaled) op.reads.insert(op.reads.begin() + 1, scales(op.reads[0]));
  op.writes = {d};
  op.bias = bias;
}

void Writer::reduce(Stream stream, std::vector<Region> terms, const Region& sum) {
  Op& op = emit(Kind::Reduce, stream);
  op.reads = std::move(terms);
  op.writes = {sum};
}

void Writer::copy(const Region& from, const Region& to, Stream stream) {
  Op& op = emit(Kind::Copy, stream);
  op.reads = {from};
  op.writes = {to};
}

void Writer::quantise(Stream stream, const Region& from, const Region& to) {
  Op& op = emit(Kind::Quantise, stream);
  op.reads = {from};
  op.writes = {to};
}

int Writer::put(const Region& from, const Region& to, int index) {
  Op& put = emit(Kind::Put, kSend);
  put.reads = {from};
  put.writes = {to};
  if (spec().scaled && gathers(spec())) {
    Op& with = emit(Kind::Put, kSend);
    with.reads = {scales(from)};
    with.writes = {scales(to)};
  }
  emit(Kind::Notify, kSend).flag = {FlagKind::Full, rank(), to.rank, index};
  return record(kSend);
}

int Writer::notify(int receiver, int index, int stored) {
  wait(kSend, stored);
  emit(Kind::Notify, kSend).flag = {FlagKind::Full, rank(), receiver, index};
  return record(kSend);
}

int Writer::await(int sender, int index, int after) {
  wait(kRecv, after);
  emit(Kind::Await, kRecv).flag = {FlagKind::Full, sender, rank(), index};
  return record(kRecv);
}

int Writer::record(Stream stream) {
  if (fresh_[stream] < 0) {
    emit(Kind::Record, stream).event = plan_.events;
    fresh_[stream] = plan_.events++;
  }
  return fresh_[stream];
}

void Writer::wait(Stream stream, int event) { emit(Kind::Wait, stream).event = event; }

void Writer::take_credits() {
  for (int distance = 1; distance < world(); ++distance) {
    emit(Kind::Await, kSend).flag = {FlagKind::Empty, rank(), peer(distance), 0};
  }
}

void Writer::return_credits() {
  if (world() == 1) return;
  for (Stream stream = kSend; stream < kMaxStreams; ++stream) {
    if (stream != kRecv && started_[stream]) wait(kRecv, record(stream));
  }
  for (int distance = 1; distance < world(); ++distance) {
    emit(Kind::Notify, kRecv).flag = {FlagKind::Empty, peer(-distance), rank(), 0};
  }
}

Plan Writer::join() {
  if (plan_.spec.copy_input) wait(kMain, begin_);  // the join may be done on another stream than the copy was
  for (Stream stream = kSend; stream < kMaxStreams; ++stream) {
    if (started_[stream]) wait(kMain, record(stream));
  }
  return std::move(plan_);
}

}  // namespace streamoverlap::plan
