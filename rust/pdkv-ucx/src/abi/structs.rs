//! The structs that cross the border, in the layout of the newest headers known (1.22, 1.23).
//!
//! Older libraries read a prefix of them. Knows no meaning beyond layout.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t` is a packed enum: one signed byte.
pub(crate) type ucs_status_t = i8;
/// NULL (done), an error in the highest hundred values, or a request.
pub(crate) type ucs_status_ptr_t = *mut c_void;

macro_rules! opaque {
    ($($(#[doc = $doc:literal])+ $name:ident;)+) => { $( $(#[doc = $doc])+ #[repr(C)] pub(crate) struct $name { _opaque: [u8; 0] } )+ };
}

opaque! {
    /// What `ucp_context_h` points to.
    ucp_context;
    /// What `ucp_worker_h` points to.
    ucp_worker;
    /// What `ucp_ep_h` points to.
    ucp_ep;
    /// What `ucp_mem_h` points to.
    ucp_mem;
    /// What `ucp_rkey_h` points to.
    ucp_rkey;
    /// A configuration that was read and not yet used.
    ucp_config;
    /// A worker's address, bytes of a length that UCX tells beside it.
    ucp_address;
}

pub(crate) type ucp_context_h = *mut ucp_context;
pub(crate) type ucp_worker_h = *mut ucp_worker;
pub(crate) type ucp_ep_h = *mut ucp_ep;
pub(crate) type ucp_mem_h = *mut ucp_mem;
pub(crate) type ucp_rkey_h = *mut ucp_rkey;

/// A struct that is valid when all its bytes are zero, which is how each one starts.
pub(crate) trait Zeroed: Sized {
    /// The struct with every byte zero: no mask bit set, every pointer null.
    fn zeroed() -> Self;
}

macro_rules! zeroed {
    ($($name:ident),+ $(,)?) => { $( impl Zeroed for $name {
        fn zeroed() -> Self {
            // SAFETY: every field is an integer, a raw pointer, an optional function pointer or an array of
            // integers, for all of which zero is a value.
            unsafe { std::mem::zeroed() }
        }
    } )+ };
}

pub(crate) use zeroed;

zeroed!(
    ucp_lib_attr_t,
    ucp_params_t,
    ucp_context_attr_t,
    ucp_worker_params_t,
    ucp_worker_attr_t,
    ucp_ep_params_t,
    ucp_ep_attr_t,
    ucp_mem_map_params_t,
    ucp_request_param_t,
    ucp_request_attr_t,
    ucp_am_handler_param_t,
    ucp_transport_entry_t,
);

/// What a context is opened with.
#[repr(C)]
pub(crate) struct ucp_params_t {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: *mut c_void,
    pub request_cleanup: *mut c_void,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const c_char,
    pub node_local_id: usize,
}

/// What a context tells about itself.
#[repr(C)]
pub(crate) struct ucp_context_attr_t {
    pub field_mask: u64,
    pub request_size: usize,
    pub thread_mode: c_uint,
    pub memory_types: u64,
    pub name: [c_char; 32],
    pub device_counter_size: usize,
}

/// What a library tells about how it was built.
#[repr(C)]
pub(crate) struct ucp_lib_attr_t {
    pub field_mask: u64,
    pub max_thread_level: c_uint,
}

/// What a worker is created with.
#[repr(C)]
pub(crate) struct ucp_worker_params_t {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub cpu_mask: [u64; 16],
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: *const c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}

/// What a worker tells about itself.
#[repr(C)]
pub(crate) struct ucp_worker_attr_t {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub address_flags: u32,
    pub address: *mut ucp_address,
    pub address_length: usize,
    pub max_am_header: usize,
    pub name: [c_char; 32],
    pub max_debug_string: usize,
}

/// Called when an endpoint fails.
pub(crate) type ucp_err_handler_cb_t = unsafe extern "C" fn(arg: *mut c_void, ep: ucp_ep_h, status: ucs_status_t);

/// The callback of a failed endpoint and its argument.
#[repr(C)]
pub(crate) struct ucp_err_handler_t {
    pub cb: Option<ucp_err_handler_cb_t>,
    pub arg: *mut c_void,
}

/// A socket address with its length.
#[repr(C)]
pub(crate) struct ucs_sock_addr_t {
    pub addr: *const c_void,
    pub addrlen: u32,
}

/// What an endpoint is created with.
#[repr(C)]
pub(crate) struct ucp_ep_params_t {
    pub field_mask: u64,
    pub address: *const ucp_address,
    pub err_mode: c_uint,
    pub err_handler: ucp_err_handler_t,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub sockaddr: ucs_sock_addr_t,
    pub conn_request: *mut c_void,
    pub name: *const c_char,
    pub local_sockaddr: ucs_sock_addr_t,
}

/// One transport and device that an endpoint uses.
#[repr(C)]
pub(crate) struct ucp_transport_entry_t {
    pub transport_name: *const c_char,
    pub device_name: *const c_char,
}

/// The caller's array of entries.
#[repr(C)]
pub(crate) struct ucp_transports_t {
    pub entries: *mut ucp_transport_entry_t,
    pub num_entries: c_uint,
    pub entry_size: usize,
}

/// What an endpoint tells about itself; 1.13 stops before `transports`.
#[repr(C)]
pub(crate) struct ucp_ep_attr_t {
    pub field_mask: u64,
    pub name: [c_char; 32],
    pub local_sockaddr: [u64; 16],
    pub remote_sockaddr: [u64; 16],
    pub transports: ucp_transports_t,
    pub user_data: *mut c_void,
}

/// What memory is mapped with.
#[repr(C)]
pub(crate) struct ucp_mem_map_params_t {
    pub field_mask: u64,
    pub address: *mut c_void,
    pub length: usize,
    pub flags: c_uint,
    pub prot: c_uint,
    pub memory_type: c_uint,
    pub exported_memh_buffer: *const c_void,
}

/// Called when a put, get, send, flush or close is done.
pub(crate) type ucp_send_nbx_callback_t =
    unsafe extern "C" fn(request: *mut c_void, status: ucs_status_t, user_data: *mut c_void);
/// Called when the data of an active message has been received.
pub(crate) type ucp_am_recv_data_nbx_callback_t =
    unsafe extern "C" fn(request: *mut c_void, status: ucs_status_t, length: usize, user_data: *mut c_void);

/// One of several callbacks, according to the operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ucp_callback {
    pub send: Option<ucp_send_nbx_callback_t>,
    pub recv_am: Option<ucp_am_recv_data_nbx_callback_t>,
}

/// How one operation is to be done; the mask holds both fields and flags.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ucp_request_param_t {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub cb: ucp_callback,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_uint,
    pub recv_info: *mut usize,
    pub memh: ucp_mem_h,
    pub remote_datatype: u64,
    pub remote: *const c_void,
    pub remote_count: usize,
}

/// What a request tells about itself.
#[repr(C)]
pub(crate) struct ucp_request_attr_t {
    pub field_mask: u64,
    pub debug_string: *mut c_char,
    pub debug_string_size: usize,
    pub status: ucs_status_t,
    pub mem_type: c_uint,
}

/// What an active message arrives with.
#[repr(C)]
pub(crate) struct ucp_am_recv_param_t {
    pub recv_attr: u64,
    pub reply_ep: ucp_ep_h,
}

/// Called when an active message arrives.
pub(crate) type ucp_am_recv_callback_t = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t;

/// Which callback takes the active messages of an id.
#[repr(C)]
pub(crate) struct ucp_am_handler_param_t {
    pub field_mask: u64,
    pub id: c_uint,
    pub flags: u32,
    pub cb: Option<ucp_am_recv_callback_t>,
    pub arg: *mut c_void,
}

/// One piece of a scattered buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ucp_dt_iov_t {
    pub buffer: *mut c_void,
    pub length: usize,
}
