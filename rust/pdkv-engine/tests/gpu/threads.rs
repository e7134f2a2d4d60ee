//! A system that gives no more threads.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use pdkv_core::id::TransferId;
use pdkv_core::wire::{Done, Message};
use pdkv_core::{ErrorKind, Retry};
use pdkv_engine::TransportKind;

use crate::common::fake::{Wire, claim};
use crate::common::standin::is_here;
use crate::common::{LEASE, Memory, cache, engine, table};
use crate::looks;

static REFUSED: AtomicBool = AtomicBool::new(false);
const EAGAIN: c_int = 11;

unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Create = unsafe extern "C" fn(*mut c_void, *const c_void, *const c_void, *mut c_void) -> c_int;

/// Takes the place of the C library's in this program: no thread is made while they are refused.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    start: *const c_void,
    argument: *mut c_void,
) -> c_int {
    const NEXT: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);
    if REFUSED.load(Ordering::Acquire) {
        return EAGAIN;
    }
    // SAFETY: a C string; the next library that has it is the C library.
    let found = unsafe { dlsym(NEXT, c"pthread_create".as_ptr()) };
    // SAFETY: declared so by POSIX.
    let create: Create = unsafe { std::mem::transmute(found) };
    // SAFETY: what the caller gives.
    unsafe { create(thread, attributes, start, argument) }
}

#[test]
fn a_fence_for_which_there_is_no_thread_is_refused_and_may_be_tried_again() {
    if !is_here("threads::a_fence_for_which_there_is_no_thread_is_refused_and_may_be_tried_again") {
        return;
    }
    let owner = engine("owner", &[TransportKind::Tcp]);
    let cache = cache(&owner, Memory::Segments);
    let export = cache.export(table(&[5, 6]), 8, b"", 1, LEASE).unwrap();
    let mut wire = Wire::connect(owner.address().unwrap());
    wire.shake_hands();
    let mut fence = |number| {
        let asked = claim(number, export.reference(), cache.fingerprint());
        wire.send(&Message::Claim(Box::new(asked)));
        assert!(matches!(wire.receive(), Some(Message::Grant(_))));
        let transfer = TransferId(number);
        wire.send(&Message::Done(Done { transfer, bytes: 0 }));
        wire.receive()
    };
    let before = looks();
    REFUSED.store(true, Ordering::Release);
    let answer = fence(1);
    REFUSED.store(false, Ordering::Release);
    let Some(Message::Nack(nack)) = answer else {
        panic!("not refused: {answer:?}")
    };
    assert_eq!(looks(), before, "the driver was asked on a thread that others wait for");
    let error = nack.fault.into_error("fence");
    assert_eq!(error.kind(), ErrorKind::Capacity, "{error}");
    assert_eq!(error.retry(), Retry::Later);
    assert!(error.message().contains("no thread"), "{error}");
    assert!(matches!(fence(2), Some(Message::Ack(_))));
}
