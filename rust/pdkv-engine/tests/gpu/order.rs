//! A transfer and the streams of others: what comes after what.

use std::sync::Arc;
use std::time::Duration;

use pdkv_device::cuda::{Event, Gpu, PinnedBuffer, Stream, copy_async};
use pdkv_engine::{LocalSpan, PullOptions, RawOptions, RemoteSpan, TransferState, TransportKind};

use crate::common::standin::{Hold, is_here};
use crate::common::{Memory, WAIT, engine, memory};
use crate::{came_over, pair, pull, pull_under_way};

const LEN: usize = 4096;

/// A stream that writes 9 into device memory, and the point after it.
pub(crate) struct Writer {
    pub(crate) stream: Stream,
    pub(crate) written: Arc<Event>,
    #[expect(dead_code, reason = "the stream reads it")]
    nines: PinnedBuffer,
}

impl Writer {
    pub(crate) fn into_memory(address: u64) -> Self {
        let gpu = Gpu::open(0).unwrap();
        let stream = Stream::new(gpu.context()).unwrap();
        let nines = PinnedBuffer::new(gpu.context(), LEN).unwrap();
        nines.write(0, &[9; LEN]).unwrap();
        let written = Arc::new(Event::new(gpu.context()).unwrap());
        // SAFETY: both outlive the stream's work, which the test waits for.
        unsafe { copy_async(&stream, address, nines.address(), LEN) }.unwrap();
        written.record(&stream).unwrap();
        Self { stream, written, nines }
    }
}

#[test]
fn a_push_sends_what_the_stream_before_it_writes() {
    if !is_here("order::a_push_sends_what_the_stream_before_it_writes") {
        return;
    }
    // By a GPU, whose stream waits; and by the processor, which begins later.
    for (kind, into) in [
        (TransportKind::Cuda, Memory::Device),
        (TransportKind::Inproc, Memory::Private),
    ] {
        let (owner, writer) = (engine("owner", &[kind]), engine("writer", &[kind]));
        let there = owner.register(memory(into, LEN as u64), None, true).unwrap();
        let here = writer.register(memory(into, LEN as u64), None, true).unwrap();
        let peer = writer
            .connect(owner.address().unwrap(), Duration::from_secs(30))
            .unwrap();
        let held = Hold::everything();
        let stream = Writer::into_memory(here.memory().address());
        let span = LocalSpan {
            region: here.id(),
            offset: 0,
            len: LEN as u64,
        };
        let far = RemoteSpan {
            region: there.id(),
            offset: 0,
            len: LEN as u64,
        };
        let options = RawOptions {
            after: Some(Arc::clone(&stream.written)),
            ..RawOptions::default()
        };
        let transfer = peer.write(&[far], &[span], Some(b"there"), &options).unwrap();
        assert!(
            transfer.wait(Some(Duration::from_millis(20))).is_err(),
            "{kind}: it did not wait"
        );
        drop(held);
        stream.stream.synchronize().unwrap();
        transfer.wait(WAIT).unwrap();
        let mut got = [0; LEN];
        there.memory().read_at(0, &mut got).unwrap();
        assert!(got == [9; LEN], "{kind}: the bytes from before were sent");
    }
}

#[test]
fn one_that_is_cancelled_while_it_waits_ends_without_the_event() {
    if !is_here("order::one_that_is_cancelled_while_it_waits_ends_without_the_event") {
        return;
    }
    let (owner, writer) = (
        engine("owner", &[TransportKind::Inproc]),
        engine("writer", &[TransportKind::Inproc]),
    );
    let there = owner.register(memory(Memory::Private, 64), None, true).unwrap();
    let here = writer.register(memory(Memory::Private, 64), None, true).unwrap();
    let peer = writer
        .connect(owner.address().unwrap(), Duration::from_secs(30))
        .unwrap();
    let scratch = memory(Memory::Device, LEN as u64);
    let held = Hold::everything();
    let stream = Writer::into_memory(scratch.address());
    let options = RawOptions {
        after: Some(Arc::clone(&stream.written)),
        ..RawOptions::default()
    };
    let (near, far) = (
        LocalSpan {
            region: here.id(),
            offset: 0,
            len: 64,
        },
        RemoteSpan {
            region: there.id(),
            offset: 0,
            len: 64,
        },
    );
    let transfer = peer.write(&[far], &[near], None, &options).unwrap();
    transfer.cancel();
    assert!(transfer.wait_quiesced(WAIT));
    assert_eq!(transfer.state(), TransferState::Cancelled);
    drop(held);
    stream.stream.synchronize().unwrap();
}

#[test]
fn a_cancelled_pull_is_quiesced_when_the_gpu_is_out_of_its_memory_and_not_before() {
    if !is_here("order::a_cancelled_pull_is_quiesced_when_the_gpu_is_out_of_its_memory_and_not_before") {
        return;
    }
    let pair = pair();
    let held = Hold::kernels();
    let transfer = pull_under_way(&pair, &PullOptions::default());
    transfer.cancel();
    assert_eq!(transfer.state(), TransferState::Cancelled);
    assert!(
        !transfer.wait_quiesced(Some(Duration::from_millis(20))),
        "the GPU writes on"
    );
    drop(held);
    assert!(transfer.wait_quiesced(WAIT));
    assert_eq!(transfer.state(), TransferState::Cancelled);
    let again = pull(&pair, &PullOptions::default());
    again.wait(WAIT).unwrap();
    came_over(&pair);
}

#[test]
fn a_pull_past_its_deadline_fails_at_once_and_is_quiesced_later() {
    if !is_here("order::a_pull_past_its_deadline_fails_at_once_and_is_quiesced_later") {
        return;
    }
    let pair = pair();
    pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
    let held = Hold::kernels();
    let options = PullOptions {
        timeout: Duration::from_millis(200),
        ..PullOptions::default()
    };
    let transfer = pull(&pair, &options);
    let error = transfer.wait(WAIT).unwrap_err();
    assert_eq!(error.kind(), pdkv_core::ErrorKind::TransferTimeout);
    drop(held);
    assert!(transfer.wait_quiesced(WAIT));
}
