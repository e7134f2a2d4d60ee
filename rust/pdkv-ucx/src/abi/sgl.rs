//! The scatter list of UCX 1.22 and newer: many ranges in one call. Layout and constants only.

#![allow(non_camel_case_types)]

use std::ffi::c_void;

use super::constants::constants;
use super::structs::{Zeroed, ucp_mem_h, ucp_rkey_h, zeroed};

/// The local side of a scatter list (1.22 and newer).
#[repr(C)]
pub(crate) struct ucp_dt_local_sgl_t {
    pub field_mask: u64,
    pub buffers: *const *mut c_void,
    pub lengths: *const usize,
    pub memhs: *const ucp_mem_h,
    pub counts: *const usize,
    pub strides: *const usize,
}

/// The remote side of a scatter list (1.22 and newer).
#[repr(C)]
pub(crate) struct ucp_dt_remote_sgl_t {
    pub field_mask: u64,
    pub remote_addrs: *const u64,
    pub lengths: *const usize,
    pub rkeys: *const ucp_rkey_h,
}

zeroed!(ucp_dt_local_sgl_t, ucp_dt_remote_sgl_t);

constants! {
    UCP_OP_ATTR_FIELD_REMOTE_DATATYPE: u32 = 1 << 9;
    UCP_OP_ATTR_FIELD_REMOTE: u32 = 1 << 10;
    UCP_OP_ATTR_FIELD_REMOTE_COUNT: u32 = 1 << 11;
    UCP_DATATYPE_SGL: u64 = 4;
    UCP_DT_LOCAL_SGL_FIELD_BUFFERS: u64 = 1 << 0;
    UCP_DT_LOCAL_SGL_FIELD_LENGTHS: u64 = 1 << 1;
    UCP_DT_LOCAL_SGL_FIELD_MEMHS: u64 = 1 << 2;
    UCP_DT_REMOTE_SGL_FIELD_REMOTE_ADDRS: u64 = 1 << 0;
    UCP_DT_REMOTE_SGL_FIELD_LENGTHS: u64 = 1 << 1;
    UCP_DT_REMOTE_SGL_FIELD_RKEYS: u64 = 1 << 2;
}
