# find_package(lockstep) for other projects: lockstep::lockstep, and with COMPONENTS nn lockstep::nn.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

install(TARGETS lockstep EXPORT lockstepTargets)
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION ${package_dir})
install(DIRECTORY include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        PATTERN nn EXCLUDE PATTERN nn.hpp EXCLUDE)

# Apart from the core, so that a program of the core needs no libtorch.
if(TARGET lockstep_nn)
  install(TARGETS lockstep_nn EXPORT lockstepNnTargets)
  install(EXPORT lockstepNnTargets NAMESPACE lockstep:: DESTINATION ${package_dir})
  install(FILES include/lockstep/nn.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
  install(DIRECTORY include/lockstep/nn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
  install(FILES cmake/LockstepTorch.cmake DESTINATION ${package_dir})
endif()

configure_package_config_file(cmake/lockstepConfig.cmake.in lockstepConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(lockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
              ${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
        DESTINATION ${package_dir})
